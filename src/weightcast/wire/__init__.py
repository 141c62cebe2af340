"""The agreement between both processes: layout, box, bucket, messages, routes.  No network, no group, no kernel."""
