"""The prefill role: runs prompts, hands their KV over, and answers with the first token."""
