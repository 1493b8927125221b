"""The decode service: a data-parallel group of vLLM engines that runs only uniform decode steps."""
