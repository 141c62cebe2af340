"""An engine that cannot prove the level asked for is named, and refused with ``strict``."""

from __future__ import annotations

import re

import pytest

from tests.helpers.roster import info, link_to
from weightcast.config import UpdateConfig
from weightcast.errors import ConfigError
from weightcast.transports.preflight import check_proof


@pytest.mark.parametrize("level", ["received", "resident"])
def test_an_engine_that_can_prove_nothing_is_named_or_refused(caplog, level):
    stock = info("sglang")
    link = link_to(stock)
    words = rf"http://u \(.*\) cannot prove that weights are {level}"
    for _ in range(2):
        check_proof([link], UpdateConfig(verify=level))
    [record] = caplog.records
    assert re.search(words, record.getMessage())
    other = link_to(stock, "http://v")
    with pytest.raises(ConfigError, match=rf"{words}; http://v .*, and strict=True asks for it"):
        check_proof([link, other], UpdateConfig(verify=level, strict=True))
    check_proof([link], UpdateConfig(verify="none", strict=True))
