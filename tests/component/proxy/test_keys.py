"""API keys over HTTP: what is open, what a key opens, and how a refusal looks to the clients of both APIs."""

import asyncio
import base64
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from certificates import Authority
from component.proxy.conftest import Start
from component.proxy.live_stack import free_port
from component.proxy.stack import DEADLINE_S, Stack, refusals

KEY = "sk-of-the-web-team-1"
ADMIN = "sk-of-operations-01"
ASK: dict[str, Any] = {"model": "pico", "prompt": "Some words.", "max_tokens": 4}
CHAT: dict[str, Any] = {"model": "pico", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
async def guarded(start: Start, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """A proxy that asks for keys."""
    monkeypatch.setenv("LOCKSTEP_API_KEYS", f"web {KEY}; ops {ADMIN} admin")
    return await start()


async def test_what_each_key_opens(guarded: Stack) -> None:
    """Nothing but the health routes is open; what is of all clients takes an admin's key."""
    every_key = ("/v1/models", "/version", "/v1/embeddings")
    of_admins = ("/metrics", "/lockstep/status", "/load", "/reset_prefix_cache", "/no/such/path")
    for path in ("/health", "/healthz", "/readyz", "/ping"):
        assert (await guarded.http.get(path)).status_code == 200, path
    for path in (*every_key, *of_admins, "//metrics", "/metrics/"):
        assert (await guarded.http.get(path)).status_code == 401, path
        assert (await guarded.http.get(path, headers=bearer(KEY + "x"))).status_code == 401, path
    for path in every_key:
        answer = await guarded.http.get(path, headers=bearer(KEY))
        assert answer.status_code not in (401, 403), path
    for path in of_admins:
        assert (await guarded.http.get(path, headers=bearer(KEY))).status_code == 403, path
        assert (await guarded.http.get(path, headers=bearer(ADMIN))).status_code in (200, 404), path
    assert refusals(guarded) == {"unauthenticated": 2 * 10, "forbidden": len(of_admins)}


async def test_clients_of_both_apis_are_told_in_their_own_words(guarded: Stack) -> None:
    """Their libraries make an authentication error of it, and work with the key."""
    url = str(guarded.http.base_url)
    for key, error in ((KEY, None), ("wrong", openai.AuthenticationError)):
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key=key, max_retries=0) as client:
            if error is None:
                assert (await client.completions.create(**ASK)).choices[0].text
            else:
                with pytest.raises(error) as refused:
                    await client.completions.create(**ASK)
                assert refused.value.code == "invalid_api_key"
                assert refused.value.type == "invalid_request_error"
    async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as claude:
        assert (await claude.messages.create(**CHAT)).content
    async with anthropic.AsyncAnthropic(base_url=url, api_key="wrong", max_retries=0) as claude:
        with pytest.raises(anthropic.AuthenticationError) as denied:
            await claude.messages.create(**CHAT)
    assert denied.value.body["error"]["type"] == "authentication_error"


async def test_log_names_the_label_and_never_the_key(
    guarded: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says whose request it was."""
    with caplog.at_level(logging.INFO):
        await guarded.http.post("/v1/completions", json=ASK, headers=bearer(KEY))
        await guarded.http.post("/v1/completions", json=ASK, headers=bearer("sk-that-is-not-ours"))
    assert any(", key=web " in record.getMessage() for record in caplog.records)
    assert "sk-" not in caplog.text


async def test_whoever_shows_no_key_is_told_no_addresses(guarded: Stack) -> None:
    """/readyz is open; the status says which node it is."""
    await guarded.decode[0].stop()
    async with asyncio.timeout(DEADLINE_S):
        while (answer := await guarded.http.get("/readyz")).status_code == 200:
            pass
    assert answer.status_code == 503
    assert "127.0.0.1" not in answer.text
    status = await guarded.http.get("/lockstep/status", headers=bearer(ADMIN))
    assert guarded.decode[0].address in status.text


async def test_browser_may_ask_whether_it_may_ask(guarded: Stack) -> None:
    """The request before the request carries no key; vLLM answers it, by its --allowed-origins."""
    headers = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    assert (await guarded.http.options("/v1/completions", headers=headers)).text == "Disallowed CORS origin"


async def test_body_behind_a_refusal_is_read_and_the_connection_goes_on(guarded: Stack) -> None:
    """Otherwise a client that is still sending sees a broken connection instead of the reason."""
    big = {**ASK, "prompt": "x" * 3_000_000}
    for _ in range(2):
        assert (await guarded.http.post("/v1/completions", json=big)).status_code == 401
    answer = await guarded.http.post("/v1/completions", json=ASK, headers=bearer(KEY))
    assert answer.status_code == 200


@pytest.fixture
async def page(start: Start, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    """The admin port of a proxy with keys, on every address."""
    monkeypatch.setenv("LOCKSTEP_API_KEYS", f"web {KEY}; ops {ADMIN} admin")
    port = free_port()
    await start("--admin-port", str(port), "--admin-host", "0.0.0.0", "--insecure-bind")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as http:
        yield http


async def test_admin_port_that_others_reach_takes_an_admins_key(page: httpx.AsyncClient) -> None:
    """A browser sends it as a password, which it asks for when it is told Basic."""
    for path in ("/lockstep/", "/lockstep/status", "/metrics"):
        refused = await page.get(path)
        assert (refused.status_code, refused.headers["WWW-Authenticate"][:5]) == (401, "Basic")
        assert (await page.get(path, headers=bearer(KEY))).status_code == 403
        assert (await page.get(path, headers=bearer(ADMIN))).status_code == 200
        assert (await page.get(path, auth=("anybody", ADMIN))).status_code == 200
    odd = {"Authorization": "Basic " + base64.b64encode(ADMIN.encode()).decode()}
    assert (await page.get("/metrics", headers=odd)).status_code == 401


async def test_admin_port_of_this_machine_takes_none(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is on the machine sees the page and the metrics, where the API port asks for a key."""
    monkeypatch.setenv("LOCKSTEP_API_KEYS", f"web {KEY}")
    port = free_port()
    await start("--admin-port", str(port))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as http:
        assert "lockstep_proxy_requests_total" in (await http.get("/metrics")).text


async def test_tls_with_the_flags_of_vllm(start: Start, tmp_path: Path) -> None:
    """HTTPS only, and with --ssl-cert-reqs 2 only for those with a certificate."""
    authority = Authority(tmp_path)
    cert, key = authority.issue("127.0.0.1")
    stack = await start(
        *("--ssl-certfile", str(cert), "--ssl-keyfile", str(key)),
        *("--ssl-ca-certs", str(authority.ca_file), "--ssl-cert-reqs", "2"),
    )
    url = str(stack.http.base_url)
    stranger = ssl.create_default_context(cafile=str(authority.ca_file))
    known = ssl.create_default_context(cafile=str(authority.ca_file))
    known.load_cert_chain(*(str(file) for file in authority.issue("client")))
    async with httpx.AsyncClient(verify=known) as client:
        answer = await client.post(url + "/v1/completions", json=ASK)
        assert answer.json()["choices"][0]["text"]
    async with httpx.AsyncClient(verify=stranger) as client:
        with pytest.raises(httpx.TransportError):
            await client.get(url + "/health")
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.TransportError):
            await client.get(url.replace("https:", "http:") + "/health")
