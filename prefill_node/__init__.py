"""The prefill service: vLLM engines that compute prompts and push their KV cache to decode nodes."""
