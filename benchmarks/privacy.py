"""Measure the cost of privacy: accuracy by epsilon on csbm, and the error of secure aggregation.

    python benchmarks/privacy.py            # both tables of docs/privacy.md, some minutes
    python benchmarks/privacy.py --part dp
    python benchmarks/privacy.py --part secure

Accuracy is that of the last round on test nodes, in the method's own view, since selecting a round
by scores would reveal something about the scores. The error of secure aggregation is that of one
aggregate, compared with the plain mean.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import polyphily
from polyphily.core.budget import Budget

DATA = "csbm:homophily=0.5,gap=0.8,spread=even,nodes=400-800"
NETWORK = {"backbone": "gcn", "hidden": 16, "layers": 2, "epochs": 3, "evaluate_every": 1000}
EPSILONS = (None, 1e5, 1e4, 1e3, 1e2, 8.0, 1.0)


def accuracies(method: str, clients: int, seeds: list[int], **settings: object) -> list[float]:
    federations = [
        polyphily.load(DATA, clients=clients, split="0.1,0.3,0.6", seed=seed) for seed in seeds
    ]
    summary = polyphily.run(method, federations, **NETWORK, **settings).summary
    runs = summary.get("per_seed", [summary])
    return [100 * run["final"]["test"]["accuracy"] for run in runs]


def dp(seeds: list[int], rounds: int, clip: float, crowds: list[int], method: str) -> None:
    print(f"{method}, csbm, {rounds} rounds, clip {clip:g}, delta 1e-5, seeds {seeds}")
    print("epsilon  noise on a number  " + "  ".join(f"{k:4d} clients" for k in crowds))
    for epsilon in EPSILONS:
        chosen: dict[str, object] = {"rounds": rounds}
        noise = 0.0
        if epsilon is not None:
            chosen["dp"] = f"epsilon={epsilon:g},delta=1e-5,clip={clip:g}"
            noise = 2 * clip * Budget(epsilon).multiplier(rounds)
        cells = []
        for clients in crowds:
            found = accuracies(method, clients, seeds, **chosen)
            spread = statistics.stdev(found) if len(found) > 1 else 0.0
            cells.append(f"{statistics.fmean(found):.1f} ± {spread:.1f}")
        name = "off" if epsilon is None else f"{epsilon:g}"
        cells = [f"{cell:>12}" for cell in cells]
        print(f"{name:>7}  {noise:17.3g}  " + "  ".join(cells), flush=True)


def secure() -> None:
    from polyphily.privacy.secure_aggregation import STEP, decode, encode, run_round

    rng = np.random.default_rng(0)
    print("secure aggregation of weighted models: weights 400 to 800, values of deviation 1")
    print("clients  numbers  gone  error of the mean  bound  seconds  kB a client")
    for clients, size, gone in ((4, 20_000, 1), (10, 20_000, 1), (10, 200_000, 0), (30, 20_000, 5)):
        weights = rng.integers(400, 800, clients)
        values = rng.normal(size=(clients, size))
        here = range(gone, clients)
        numbers = {k: encode(weights[k] * values[k], clients) for k in here}
        began = time.perf_counter()
        seen = run_round(numbers, range(clients))
        total = decode(seen.total())
        seconds = time.perf_counter() - began
        share = weights[gone:] / weights[gone:].sum()
        error = np.abs(total / weights[gone:].sum() - share @ values[gone:]).max()
        bound = len(here) * STEP / 2 / weights[gone:].sum()
        print(
            f"{clients:7d}  {size:7d}  {gone:4d}  {error:17.1e}  {bound:.0e}  {seconds:7.2f}  "
            f"{seen.bytes_up / clients / 1000:11.0f}",
            flush=True,
        )
    federation = polyphily.load(DATA, clients=10, split="0.1,0.3,0.6")
    plain, masked = (
        polyphily.run("fedavg", federation, rounds=20, secure_aggregation=chosen, **NETWORK)
        for chosen in (False, True)
    )
    both = [result.models["global"] for result in (plain, masked)]
    apart = max(float((both[0][n] - both[1][n]).abs().max()) for n in both[0])
    scores = [100 * r.summary["final"]["test"]["accuracy"] for r in (plain, masked)]
    print(
        f"20 rounds of fedavg, plain and masked: weights {apart:.1e} apart (float32), "
        f"test accuracy {scores[0]:.2f} and {scores[1]:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["dp", "secure"])
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100])
    args = parser.parse_args()
    if args.part != "secure":
        dp(args.seeds, args.rounds, args.clip, args.clients, args.method)
    if args.part != "dp":
        secure()


if __name__ == "__main__":
    main()
