"""The proxy's flags about who may ask it, how much, and how long it waits for clients."""

from pydantic import Field, SecretStr

from lockstep.config import ServiceConfig


class AdmissionConfig(ServiceConfig):
    """A part of `ProxyConfig`."""

    api_key_file: str | None = Field(
        None,
        description="file of the API keys that clients show, one a line: LABEL KEY [admin] [priority=N] "
        "[max_requests=N] [tokens_per_minute=N]; read again when it changes; LOCKSTEP_API_KEYS instead holds "
        "such lines itself, with ; between them",
    )
    api_keys: SecretStr | None = Field(None)
    key_max_requests: int | None = Field(
        None, ge=1, description="requests that an API key without a limit of its own may have in progress"
    )
    key_tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="tokens, of prompts and answers, that an API key without a limit of its own may use",
    )
    max_queued_requests: int = Field(
        4096, ge=1, description="choices that may wait here; one more is answered 503 with Retry-After"
    )
    queue_timeout_s: float = Field(
        300.0, gt=0, description="longest time a choice may wait here before it is sent for the first time"
    )
    max_body_bytes: int = Field(
        32 * 1024 * 1024,
        ge=1024,
        description="largest body of a request; as many as sixteen may be held",
    )
    slow_client_timeout_s: float = Field(
        30.0,
        gt=0,
        description="how long a client may leave its answer unread, or not go on sending its request",
    )
