"""1P1D beside two colocated workers (and two vLLM servers) on the same cores."""
