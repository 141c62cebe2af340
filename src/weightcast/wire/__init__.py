"""What both processes must agree on: layout, bucket, messages, digest, routes.  No network, no group."""
