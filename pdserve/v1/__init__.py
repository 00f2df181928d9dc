"""The wire contract: stubs generated from `proto/pdserve/v1/*.proto` (`make proto`), and its errors."""
