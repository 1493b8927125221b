"""What the front end is built for: the part of a node's description that clients can tell apart."""

from dataclasses import dataclass

from proxy.nodes import Node


@dataclass(frozen=True, slots=True)
class Served:
    """One front end's view of the nodes. Nodes of several compatibility keys may share it.

    What is in here cannot change under a request: its text is tokenized, checked and bounded by it.
    """

    model: str
    revision: str
    tokenizer: str
    tokenizer_hash: str
    generation_config: str
    generation_config_hash: str
    trust_remote_code: bool
    speculates: bool
    """vLLM refuses some sampling parameters with speculative decoding."""
    context_limit_tokens: int

    @classmethod
    def by(cls, prefill: Node, decode: Node) -> "Served":
        """What a pair of nodes that fit together serves."""
        limit_tokens = min(node.description.served_context_limit for node in (prefill, decode))
        return cls._of(decode, limit_tokens)

    @classmethod
    def _of(cls, node: Node, context_limit_tokens: int) -> "Served":
        described = node.description
        return cls(
            model=described.model,
            revision=described.revision,
            tokenizer=described.tokenizer,
            tokenizer_hash=described.tokenizer_hash,
            generation_config=described.generation_config,
            generation_config_hash=described.generation_config_hash,
            trust_remote_code=described.trust_remote_code,
            speculates=bool(described.speculative_method),
            context_limit_tokens=context_limit_tokens,
        )

    def includes(self, node: Node) -> bool:
        """Whether the node can serve what this front end admits."""
        limit_tokens = self.context_limit_tokens
        return node.description.served_context_limit >= limit_tokens and self._of(node, limit_tokens) == self
