#!/usr/bin/env python3
"""Two actors of Ray: tensors of one are read by the other with nobounce.

Needs ray and torch beside nobounce. SPDX-License-Identifier: MIT OR Apache-2.0
"""
import time

import nobounce.ray
import ray
import torch

SIZE = 64 << 20
# Before a class names it.
nobounce.ray.register()


@ray.remote
class Actor:
    @ray.method(tensor_transport="nobounce")
    def make(self, seed):
        return {"numbers": torch.arange(SIZE // 8, dtype=torch.int64) + seed, "few": torch.full((3, 5), seed), "none": torch.empty(0)}

    def is_right(self, made, seed):
        numbers = torch.equal(made["numbers"], torch.arange(SIZE // 8, dtype=torch.int64) + seed)
        return numbers and torch.equal(made["few"], torch.full((3, 5), seed)) and made["none"].numel() == 0


def main():
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
    one, other = Actor.remote(), Actor.remote()
    for seed in range(5):
        began = time.monotonic()
        right = ray.get(other.is_right.remote(one.make.remote(seed), seed), timeout=120)
        print(f"object {seed}: {'right' if right else 'WRONG'}, {1e3 * (time.monotonic() - began):.0f} ms with making and comparing")
        if not right:
            raise SystemExit(1)
    ray.shutdown()


main()
