"""The processes that Ray runs for us: workers and routers, each in an actor that wraps it."""
