"""What clients speak to: the gRPC server, its checks, and the wire's messages in and out."""
