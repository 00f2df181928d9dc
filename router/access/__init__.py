"""Who may come in: certificates, API keys, and what each key may do."""
