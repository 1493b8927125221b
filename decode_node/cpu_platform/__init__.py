"""vLLM platform plugin that gives machines without an accelerator the scheduling of one with."""
