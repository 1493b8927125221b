"""vLLM's metrics that the dashboard asks for, on the proxy's /metrics."""

from component.proxy.stack import Stack
from prometheus_client.parser import text_string_to_metric_families
from unit.deploy_metrics.test_queries import OF_VLLM


async def test_what_the_dashboard_asks_of_vllm(stack: Stack) -> None:
    """Names and labels, with values once a request was answered."""
    body = {"model": "pico", "prompt": "Some words to say.", "max_tokens": 30}
    assert (await stack.http.post("/v1/completions", json=body)).status_code == 200
    text = (await stack.http.get("/metrics")).text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in OF_VLLM and sample.value > 0:
                found[sample.name] = set(sample.labels)
    assert found == OF_VLLM
