"""What is checked of a proxy: whether it serves, and whether its timeouts fit the nodes' own."""

from collections.abc import Iterator, Sequence

from lockstep.doctor.described import DECODE, Described
from lockstep.doctor.findings import Finding, Verdict, error, ok, warning
from lockstep.status import StatusDocument


def check_proxy(document: StatusDocument, url: str, nodes: Sequence[Described]) -> Iterator[Finding]:
    """All findings about the proxy at `url`."""
    where = f"proxy {url}"
    yield Finding.of(where, "ready", _ready(document))
    yield Finding.of(where, "version", _version(document, nodes))
    yield Finding.of(where, "timeout", _timeout(document, nodes))


def _ready(document: StatusDocument) -> Verdict:
    if document.proxy.ready:
        return ok(f"ready, serves {', '.join(document.proxy.served_models)}")
    return error(f"not ready: {document.proxy.not_ready_because}", "what is said of its nodes")


def _version(document: StatusDocument, nodes: Sequence[Described]) -> Verdict:
    own = document.proxy.version
    for node in nodes:
        if node.description.lockstep_version != own:
            text = f"Lockstep {own}, but {node.description.lockstep_version} on {node.where}"
            return error(text, "the same Lockstep version everywhere")
    return ok(f"Lockstep {own}")


def _timeout(document: StatusDocument, nodes: Sequence[Described]) -> Verdict:
    """A request must outlive the time after which decode gives a lost push up, to be tried once more."""
    limit_s = document.proxy.request_timeout_s
    deadlines = [n.description.engine.registration_deadline_s for n in nodes if n.role == DECODE]
    longest_s = max(deadlines, default=0.0)
    if limit_s is None:
        return ok("not told")
    if limit_s < 2 * longest_s:
        text = f"requests have {limit_s:g} s, decode gives a lost push up after {longest_s:g} s"
        return warning(text, f"--request-timeout-s {2 * longest_s:g}, or a lower --registration-deadline-s")
    return ok(f"{limit_s:g} s a request, {longest_s:g} s for a push")
