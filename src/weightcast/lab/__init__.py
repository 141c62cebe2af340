"""The laboratory: demo, benchmarks and stand-ins for stock engines.  Production code never imports it."""
