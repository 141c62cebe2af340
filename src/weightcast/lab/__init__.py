"""The laboratory: demo, benchmarks, soak test and stand-ins for stock engines.  Production code never imports it."""
