"""Answers of the OpenAI endpoint: the text, the counts, the ids and parameters of the legs."""

from component.proxy.stack import Stack

PROMPT = "The cat sat on the mat and looked at the moon."


async def test_completion_gives_decodes_tokens_as_text(stack: Stack) -> None:
    """The text is what decode's tokens spell, and usage counts them."""
    answer = await stack.http.post(
        "/v1/completions", json={"model": "pico", "prompt": PROMPT, "max_tokens": 100, "temperature": 0}
    )
    body = answer.json()
    assert answer.status_code == 200, body
    assert body["choices"][0]["text"] == PROMPT
    assert body["choices"][0]["finish_reason"] == "stop"
