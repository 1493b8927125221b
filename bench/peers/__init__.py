"""Lockstep beside plain vLLM and the systems people would pick instead, in one comparison."""
