"""The soak: minutes of mixed load on a stack whose prefill nodes die (`python -m bench.soak`)."""
