"""The decode role: takes KV in, decodes, and streams every step's tokens to the routers."""
