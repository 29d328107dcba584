"""A site that misbehaves in its second round: `bad_site.py BUNDLE GRAPH HOW [SECONDS]`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from polyphily.flower.deployment import Bundle
from polyphily.flower.node import join
from polyphily.flower.site import Site
from polyphily.flower.site_graph import SiteGraph
from polyphily.flower.wire import ROUND, Parcel


class BadSite(Site):
    how, seconds = "raise", 0.0

    def answer(self, asked: Parcel) -> Parcel:
        if self.how == "die" and (asked.facts["kind"], asked.facts.get("round")) == (ROUND, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        reply = super().answer(asked)
        if asked.facts["kind"] != ROUND or asked.facts["round"] != 2:
            return reply
        time.sleep(self.seconds)
        return self.spoilt(reply)

    def spoilt(self, reply: Parcel) -> Parcel:
        first = next(iter(reply.tensors))
        whole = reply.tensors[first]
        if self.how == "raise":
            raise ZeroDivisionError("something at the site")
        if self.how == "nan":
            return Parcel(reply.facts, {**reply.tensors, first: whole * torch.nan})
        if self.how == "shape":
            return Parcel(reply.facts, {**reply.tensors, first: whole[:, :1]})
        if self.how == "round":
            return Parcel({**reply.facts, "round": 7}, reply.tensors)
        if self.how == "size":
            return Parcel(reply.facts, {**reply.tensors, "more": torch.zeros(1, 4_000_000)})
        if self.how == "overflow":
            return Parcel({**reply.facts, "loss": 10**400}, reply.tensors)
        if self.how == "scale":
            return Parcel(reply.facts, {**reply.tensors, first: whole * 1e6})
        if self.how == "weight":
            return Parcel(reply.facts, {**reply.tensors, "weight": torch.tensor([-120.0])})
        return reply


if __name__ == "__main__":
    bundle = Bundle(Path(sys.argv[1]))
    graph = SiteGraph.read(Path(sys.argv[2]))
    site = BadSite(bundle.name, graph, bundle.path, identity=bundle.identity())
    site.how, site.seconds = sys.argv[3], float(sys.argv[4]) if sys.argv[4:] else 0.0
    join(bundle, site, lambda text: print(text, flush=True))
