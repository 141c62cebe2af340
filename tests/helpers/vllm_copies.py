"""Runs inside vLLM's workers, which then exchange weights by copies where they would map memory.

``--worker-extension-cls tests.helpers.vllm_copies.Streams`` does it: vLLM imports this before it loads a model.
"""

from __future__ import annotations

from tests.helpers.vllm_streams import Streams as Streams
from weightcast.plugins.vllm import weights_pool

weights_pool.maps_weights = lambda vllm_config: False
