"""Asks one request of a batch: again where the endpoint says that it may work later, and when it says so."""

import email.utils
import time
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import tenacity
from tenacity.wait import wait_base

from lockstep.batch.requests_file import BatchRequest
from lockstep.batch.results import Result
from lockstep.errors import ConfigError, UnavailableError

RETRYABLE = (408, 409, 425, 429, 502, 503, 504)
"""500 is not: a Lockstep proxy has tried such a request on other nodes already."""

_MOST_RETRY_AFTER_S = 600.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How often a request is sent at most, and how long the wait before the next time is.

    What the endpoint asks for goes before: it is waited for and never cut short by more than a jitter.
    """

    max_tries: int = 8
    first_wait_s: float = 1.0
    most_wait_s: float = 60.0


class Asker:
    """Stateless but for the connections of `client`; any number of requests may be asked at once."""

    def __init__(self, client: httpx.AsyncClient, patience: Patience) -> None:
        self._client = client
        self._patience = patience

    async def ask(self, request: BatchRequest, batch_id: str) -> Result:
        """Send it until it is answered. `batch_id` goes along as the X-Request-Id.

        Raises ConfigError when the endpoint does not take the key, UnavailableError when there is nobody:
        both are true of all other requests too.
        """
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._patience.max_tries),
            wait=_Wait(self._patience),
            retry=tenacity.retry_if_exception_type(httpx.TransportError)
            | tenacity.retry_if_result(lambda answer: answer.status_code in RETRYABLE),
            retry_error_callback=_last,
        )
        answer: httpx.Response
        content = msgspec.json.encode(request.body)
        headers = {"Content-Type": "application/json", "X-Request-Id": batch_id}
        try:
            answer = await retrying(self._client.post, request.url, content=content, headers=headers)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise UnavailableError(f"no answer from {self._client.base_url}: {error}") from error
        except httpx.TimeoutException:
            return Result(
                batch_id, request.custom_id, error_code="timeout", error_message="No answer in time."
            )
        except httpx.TransportError as error:
            said = f"The connection broke before the answer was there: {error or type(error).__name__}"
            return Result(batch_id, request.custom_id, error_code="connection_lost", error_message=said)
        return self._result(request, batch_id, answer)

    def _result(self, request: BatchRequest, batch_id: str, answer: httpx.Response) -> Result:
        if answer.status_code in (401, 403):
            raise ConfigError(
                f"{self._client.base_url} answers {answer.status_code} to this key; "
                "set OPENAI_API_KEY or give --key-file"
            )
        try:
            body: Any = msgspec.json.decode(answer.content)
        except (msgspec.DecodeError, UnicodeDecodeError):
            said = f"Status {answer.status_code} with a body that is no JSON."
            return Result(batch_id, request.custom_id, error_code="invalid_answer", error_message=said)
        given_id = answer.headers.get("x-request-id", batch_id)
        return Result(batch_id, request.custom_id, answer.status_code, given_id, body)


class _Wait(wait_base):
    """The endpoint's Retry-After, or an exponential back-off; each with a jitter, as many wait at once."""

    def __init__(self, patience: Patience) -> None:
        self._back_off = tenacity.wait_exponential(
            multiplier=patience.first_wait_s, min=patience.first_wait_s, max=patience.most_wait_s
        )
        self._jitter = tenacity.wait_random(0, patience.first_wait_s)

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        asked_s = _asked_for(retry_state)
        wait_s = asked_s if asked_s is not None else self._back_off(retry_state)
        return wait_s + self._jitter(retry_state)


def _asked_for(retry_state: tenacity.RetryCallState) -> float | None:
    outcome = retry_state.outcome
    if outcome is None or outcome.failed:
        return None
    return retry_after_s(outcome.result().headers.get("retry-after"), time.time())


def retry_after_s(value: str | None, now_s: float) -> float | None:
    """Seconds that a Retry-After header asks for (RFC 9110, 10.2.3: a number or a date), or None."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return min(float(value), _MOST_RETRY_AFTER_S)
    try:
        at_s = email.utils.parsedate_to_datetime(value).timestamp()
    except ValueError:
        return None
    return min(max(0.0, at_s - now_s), _MOST_RETRY_AFTER_S)


def _last(retry_state: tenacity.RetryCallState) -> Any:
    """After the last time: its answer as it is, or its exception."""
    assert retry_state.outcome is not None
    return retry_state.outcome.result()
