"""The check of a trace's format."""

from __future__ import annotations


def check_format(trace: dict) -> None:
    """Checks the rules of the Trace Event Format that readers insist on."""
    named = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            assert list(event["args"]) == ["name" if event["name"].endswith("name") else "sort_index"]
            named.add((event["pid"], event.get("tid")))
            continue
        assert isinstance(event["tid"], int)
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        assert (event["pid"], event["tid"]) in named
        assert event["tid"] != event["pid"]  # or Perfetto would call it the main thread
        assert (event["pid"], None) in named
        if event["ph"] == "X":
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
        else:
            assert event["ph"] in ("s", "f")
            assert isinstance(event["id"], int)
