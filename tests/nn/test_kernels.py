"""The Triton kernels against plain torch, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from builders import CPU
from polyphily.core.optimizers import Optimizer, OptimizerSpec, initial_state
from polyphily.methods.fedspa.network import EdgeKinds
from polyphily.nn import kernels
from polyphily.nn.draws import Streams
from polyphily.nn.layers import mixed_channels
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.unifilter import Packed

pytestmark = pytest.mark.skipif(not kernels.TRITON, reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
usable = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="neither a GPU nor the interpreter"
)
SIZES = (40, 1, 0, 7, 65)


def test_all_of_this_in_the_interpreter() -> None:
    """Runs this file again with Triton's interpreter on, which must be so before Triton loads."""
    if INTERPRETED or torch.cuda.is_available():
        pytest.skip("runs here already")
    arguments = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count(".") > 40, "hardly any test ran"


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@usable
@pytest.mark.parametrize("width", [1, 3, 16, 70])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rows", "share"), [(50, 0.02), (50, 0.3), (9, 0.9), (3, 0.0)])
def test_the_sparse_product(rows: int, share: float, weighted: bool, width: int) -> None:
    dense_matrix = (torch.rand(rows, 120, generator=torch.Generator().manual_seed(1)) < share) * 1.0
    if weighted:
        dense_matrix *= numbers(rows, 120, seed=2).cpu()
    row, col = dense_matrix.nonzero(as_tuple=True)
    value = dense_matrix[row, col].numpy() if weighted else None
    matrix = SparseMatrix.from_coordinates(
        row.numpy(), col.numpy(), value, (rows, 120), dtype=torch.float32, device=DEVICE
    )
    x = numbers(120, width, seed=3)
    found = kernels.sparse_product(matrix.crow, matrix.col, matrix.value, rows, x)
    torch.testing.assert_close(found, dense_matrix.to(DEVICE) @ x, rtol=1e-4, atol=1e-4)


@usable
def test_the_sparse_product_with_values_that_lie_apart() -> None:
    """Attention has a column of values for each head."""
    dense_matrix = (torch.rand(20, 20, generator=torch.Generator().manual_seed(1)) < 0.3) * 1.0
    row, col = dense_matrix.nonzero(as_tuple=True)
    matrix = SparseMatrix.from_coordinates(
        row.numpy(), col.numpy(), None, (20, 20), dtype=torch.float32, device=DEVICE
    )
    heads, x = numbers(len(row), 3), numbers(20, 8, seed=3)
    found = kernels.sparse_product(matrix.crow, matrix.col, heads[:, 1], 20, x)
    dense_matrix[row, col] = heads[:, 1].cpu()
    torch.testing.assert_close(found, dense_matrix.to(DEVICE) @ x, rtol=1e-4, atol=1e-4)


@usable
@pytest.mark.parametrize("width", [1, 5, 64, 130])
def test_products_at_entries(width: int) -> None:
    left, right = numbers(20, width), numbers(30, width, seed=1)
    row = torch.randint(0, 20, (77,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    col = torch.randint(0, 30, (77,), generator=torch.Generator().manual_seed(3)).to(DEVICE).int()
    expected = (left[row] * right[col.long()]).sum(dim=1)
    found = kernels.entry_products(row, col, left, right)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@usable
@pytest.mark.parametrize("sizes", [SIZES, (300, 251, 290)])
@pytest.mark.parametrize(("inner", "outer"), [(5, 3), (64, 1), (33, 70), (1, 16)])
def test_grouped_products_and_their_gradients(
    inner: int, outer: int, sizes: tuple[int, ...]
) -> None:
    """To float32's digits: a single product in TF32 would be off by a hundred times as much."""
    segments = Segments(sizes, DEVICE)
    x, weight = numbers(sum(sizes), inner), numbers(len(sizes), inner, outer, seed=1)
    upstream = numbers(sum(sizes), outer, seed=2)
    results = []
    for dtype in (torch.float32, torch.float64):
        given = [tensor.detach().to(dtype).requires_grad_() for tensor in (x, weight)]
        if dtype == torch.float32:
            out = segments.matmul(given[0], given[1])
        else:
            parts = zip(given[0].split(list(sizes)), given[1], strict=True)
            out = torch.cat([part @ own for part, own in parts])
        grads = torch.autograd.grad((out * upstream.to(dtype)).sum(), given)
        results.append([out, *grads])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=1e-4)


@usable
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (40,)])
def test_sums_and_expansions_by_client(shape: tuple[int, ...]) -> None:
    segments = Segments(SIZES, DEVICE)
    x = numbers(sum(SIZES), *shape).requires_grad_()
    expected = torch.stack([part.sum(dim=0) for part in x.split(list(SIZES))])
    found = segments.sum(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    weights = numbers(*found.shape, seed=1)
    (grad,) = torch.autograd.grad((found * weights).sum(), x)
    torch.testing.assert_close(grad, weights[segments.owner])
    per_client = numbers(len(SIZES), *shape, seed=2).requires_grad_()
    spread = segments.expand(per_client)
    torch.testing.assert_close(spread, per_client[segments.owner])
    (grad,) = torch.autograd.grad((spread * x.detach()).sum(), per_client)
    torch.testing.assert_close(grad, expected.detach(), rtol=1e-4, atol=1e-4)


@usable
@pytest.mark.parametrize("width", [1, 6])
def test_dropout_draws_what_plain_torch_draws(width: int) -> None:
    keys, pointers = [(0, 0), (0, 1), (7, 3)], [0, 30, 31, 80]
    x = numbers(80, width).requires_grad_()
    streams = Streams(keys, DEVICE, hashed=True)
    fused, plain = streams.of_round(4), streams.of_round(4)
    for _ in range(3):
        found = fused.dropout(x, 0.3, pointers)
        kept = plain.at_least(round(0.3 * 65536), width, pointers)
        scale = 65536 / (65536 - round(0.3 * 65536))
        torch.testing.assert_close(found, torch.where(kept, x * scale, 0))
        (grad,) = torch.autograd.grad(found.sum(), x)
        torch.testing.assert_close(grad, kept * scale * torch.ones_like(x))


@usable
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("width", [1, 6])
def test_relu_and_dropout_in_one_pass(width: int, direct: bool) -> None:
    """To the bit, and also if a loss looks at the features before dropout."""
    keys, pointers = [(0, 0), (0, 1), (7, 3)], [0, 30, 30, 80]
    x = numbers(80, width).requires_grad_()
    weights = numbers(80, width, seed=1), numbers(80, width, seed=2)
    streams = Streams(keys, DEVICE, hashed=True)
    results = []
    for fused in (True, False):
        draws = streams.of_round(4)
        for _ in range(2):  # the calls count on
            if fused:
                rectified, dropped = draws.activate(x, 0.3, pointers)
            else:
                rectified = x.relu()
                dropped = draws.dropout(rectified, 0.3, pointers)
        loss = (dropped * weights[0]).sum() + (rectified * weights[1]).sum() * direct
        results.append([rectified, dropped, *torch.autograd.grad(loss, x)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@usable
def test_relu_keeps_what_is_no_number() -> None:
    """Otherwise a client that has diverged would pass for a sound one."""
    x = torch.tensor([[torch.nan, -1.0, torch.inf]], device=DEVICE)
    rectified, dropped = (
        Streams([(0, 0)], DEVICE, hashed=True).of_round(0).activate(x, 1e-5, [0, 1])
    )
    for found in (rectified, dropped):
        assert found.isnan().tolist() == [[True, False, False]]
        assert found[0, 2] == torch.inf


@usable
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("width", [1, 7, 70])
def test_the_sparse_product_plus_a_bias(width: int, shared: bool) -> None:
    segments, rows = Segments(SIZES, DEVICE), sum(SIZES)
    dense_matrix = torch.rand(rows, rows, generator=torch.Generator().manual_seed(1))
    dense_matrix *= dense_matrix < 0.1
    row, col = dense_matrix.nonzero(as_tuple=True)
    matrix = SparseMatrix.from_coordinates(
        row.numpy(),
        col.numpy(),
        dense_matrix[row, col].numpy(),
        (rows, rows),
        dtype=torch.float32,
        device=DEVICE,
    )
    x, upstream = numbers(rows, width).requires_grad_(), numbers(rows, width, seed=1)
    bias = numbers(1 if shared else len(SIZES), width, seed=2)
    bias = (bias.expand(len(SIZES), width) if shared else bias).requires_grad_()
    found = matrix.plus(x, bias, segments)
    expected = matrix @ x + bias[segments.owner]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    grads = torch.autograd.grad((found * upstream).sum(), (x, bias))
    others = torch.autograd.grad((expected * upstream).sum(), (x, bias))
    for own, other in zip(grads, others, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


@usable
@pytest.mark.parametrize("classes", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("sizes", [SIZES, (300,), (0, 0)])
def test_the_cross_entropy_of_each_client(sizes: tuple[int, ...], classes: int) -> None:
    """Against float64, at nodes that are not all of them."""
    source, count = torch.Generator().manual_seed(1), sum(sizes)
    nodes = torch.randperm(2 * count + 3, generator=source)[:count].sort().values.to(DEVICE)
    labels = torch.randint(0, classes, (count,), generator=source).to(DEVICE)
    logits = 10 * numbers(2 * count + 3, classes)
    upstream = numbers(len(sizes), seed=3)
    one, two = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = kernels.cross_entropy(one, nodes, labels, Segments(sizes, DEVICE))
    errors = -two.log_softmax(dim=1)[nodes, labels]
    parts = errors.split(list(sizes))
    expected = torch.stack([part.sum() / max(len(part), 1) for part in parts])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad((found * upstream).sum(), one)
    (other,) = torch.autograd.grad((expected * upstream).sum(), two)
    torch.testing.assert_close(grad.double(), other, rtol=1e-5, atol=1e-6)


@usable
def test_a_clients_loss_does_not_depend_on_those_beside_it() -> None:
    sizes, segments = SIZES, Segments(SIZES, DEVICE)
    logits, nodes = numbers(sum(sizes), 7), torch.arange(sum(sizes), device=DEVICE)
    labels = nodes % 7
    together = kernels.cross_entropy(logits, nodes, labels, segments)
    for client, (start, size) in enumerate(zip(segments.pointers, sizes, strict=False)):
        own = slice(start, start + size)
        alone = Segments((size,), DEVICE)
        found = kernels.cross_entropy(logits[own], nodes[:size], labels[own], alone)
        assert found.item() == together[client].item()


@usable
@pytest.mark.parametrize("width", [1, 5, 64, 200])
@pytest.mark.parametrize("sizes", [SIZES, (300,), (0, 0)])
def test_the_layer_norm_of_each_client(sizes: tuple[int, ...], width: int) -> None:
    """Against float64: the rows, and the gradients of rows, scales and shifts."""
    segments = Segments(sizes, DEVICE)
    given = (
        3 * numbers(sum(sizes), width) + 1,
        numbers(len(sizes), width, seed=1),
        numbers(len(sizes), width, seed=2),
    )
    upstream = numbers(sum(sizes), width, seed=3)
    ones = [value.clone().requires_grad_() for value in given]
    twos = [value.double().requires_grad_() for value in given]
    found = kernels.layer_norm(*ones, segments)
    plain, scale, shift = twos
    expected = torch.nn.functional.layer_norm(plain, (width,)) * scale[segments.owner]
    expected = expected + shift[segments.owner]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad((found * upstream).sum(), ones)
    others = torch.autograd.grad((expected * upstream).sum(), twos)
    for own, other in zip(grads, others, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=1e-4, atol=1e-4)


def test_plain_torch_serves_where_kernels_do_not() -> None:
    assert not kernels.available(torch.zeros(2, dtype=torch.float64))
    assert kernels.available(torch.zeros(2)) == INTERPRETED
    assert importlib.import_module("polyphily.nn.kernels") is kernels
    assert Segments((2,), CPU).sum(torch.ones(2, 1)).item() == 2


def close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found.double(), expected.double(), rtol=2e-4, atol=2e-4)


@usable
@pytest.mark.parametrize("width", [1, 5, 16, 70])
@pytest.mark.parametrize("share", [0.02, 0.2, 0.9])
@pytest.mark.parametrize("learned", [False, True])
def test_sums_by_kind_and_their_gradients(width: int, share: float, learned: bool) -> None:
    """In float64 the sums are products with a matrix for each kind."""
    nodes = 75
    source = torch.Generator().manual_seed(4)
    upper = (torch.rand(nodes, nodes, generator=source) < share).triu(1)
    row, col = (upper | upper.T).nonzero(as_tuple=True)
    edges = SparseMatrix.from_coordinates(
        row.numpy(), col.numpy(), None, (nodes, nodes), dtype=torch.float32, device=DEVICE
    )
    both = torch.randint(0, 3, (nodes, nodes), generator=source).triu(1)
    kinds = EdgeKinds(edges, (both + both.T)[row, col].to(torch.int8).to(DEVICE))
    hom, het = numbers(nodes, width), numbers(nodes, width, seed=3)
    alpha = numbers(nodes, 1, seed=1).sigmoid()
    way = numbers(nodes, width, seed=2)
    results = []
    for dtype in (torch.float32, torch.float64):
        given = [x.detach().to(dtype).requires_grad_() for x in (hom, het, alpha)]
        given[2].requires_grad_(learned)
        out = kinds.sum(*given)
        (out * way.to(dtype)).sum().backward()
        results.append([out, *(x.grad for x in given if x.requires_grad)])
    for found, expected in zip(*results, strict=True):
        close(found, expected)


@usable
@pytest.mark.parametrize("width", [1, 3, 16, 70, 128])
@pytest.mark.parametrize("scaled", [False, True])
def test_mixed_channels_and_their_gradients(width: int, scaled: bool) -> None:
    """In float64 the mixture is made of torch's own operations."""
    segments = Segments(SIZES, DEVICE)
    rows = sum(SIZES)
    inputs = [numbers(rows, 3 * width), numbers(rows, 2 * width, seed=2)]
    inputs += [numbers(len(SIZES), width, 3, seed=4), numbers(len(SIZES), 3, 3, seed=5)]
    scales = numbers(rows, 2, seed=6).abs() if scaled else None
    way = numbers(rows, width, seed=7)
    results = []
    for dtype in (torch.float32, torch.float64):
        given = [x.detach().to(dtype).requires_grad_() for x in inputs]
        whole, near, attend, mix = given
        pair, own = whole.split([2 * width, width], dim=1)  # rows that lie apart
        factors = None if scales is None else scales.to(dtype)
        out = mixed_channels(own, pair, near, factors, attend, mix, segments)
        (out * way.to(dtype)).sum().backward()
        results.append([out, *(x.grad for x in given)])
    for found, expected in zip(*results, strict=True):
        close(found, expected)


LARGE = (300, 0, 7, 520)  # some larger than a tile of a sum


@usable
@pytest.mark.parametrize("p", [None, 0.0, 0.4])
@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize(
    ("sizes", "orders", "width"), [(SIZES, 4, 70), (SIZES, 6, 1), (LARGE, 5, 5), ((0, 0), 3, 5)]
)
def test_mixtures_of_bases_and_their_gradients(
    sizes: tuple[int, ...], orders: int, width: int, expanded: bool, p: float | None
) -> None:
    """None: no draws, as in evaluation."""
    segments = Segments(sizes, DEVICE)
    bases = numbers(orders, segments.rows, width)
    stored = numbers(len(sizes), orders, 1 if expanded else width, seed=1).requires_grad_()
    weight = stored.expand(-1, -1, width)
    streams = Streams([(5, k) for k in range(len(sizes))], DEVICE, hashed=True)
    fused, plain = (None if p is None else streams.of_round(3) for _ in range(2))
    found = Packed(segments, bases).mixture(weight, fused, p or 0.0)
    assert found.grad_fn is not None
    assert found.grad_fn.name() == "_MixtureBackward", "no kernel was used"

    kept = torch.ones_like(bases)
    if plain is not None and p:
        dropped = round(p * 65536)
        drawn = [plain.at_least(dropped, width, segments.pointers) for _ in bases]
        kept = torch.stack(drawn) * (65536 / (65536 - dropped))
        assert segments.rows == 0 or 0.2 < float((kept == 0).float().mean()) < 0.6
    expected = (kept * bases * weight[segments.owner].transpose(0, 1)).sum(dim=0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    upstream = numbers(*expected.shape, seed=2)
    (ours,) = torch.autograd.grad((found * upstream).sum(), stored)
    (theirs,) = torch.autograd.grad((expected * upstream).sum(), stored)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@usable
def test_a_mixture_draws_as_many_masks_as_there_are_bases() -> None:
    segments = Segments(SIZES, DEVICE)
    bases, weight = numbers(3, segments.rows, 2), numbers(len(SIZES), 3, 2, seed=1)
    streams = Streams([(5, k) for k in range(len(SIZES))], DEVICE, hashed=True)
    fused, plain = streams.of_round(3), streams.of_round(3)
    x = torch.ones(segments.rows, 9, device=DEVICE)
    for p in (0.4, 0.0, 0.4):
        Packed(segments, bases).mixture(weight, fused, p)
        for basis in bases:
            plain.dropout(basis, p, segments.pointers)
        after = fused.dropout(x, 0.5, segments.pointers)
        assert torch.equal(after, plain.dropout(x, 0.5, segments.pointers))


@usable
def test_a_mixture_of_other_draws_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "mixture", lambda *_: pytest.fail("a kernel cannot draw these"))
    segments = Segments(SIZES, CPU)
    streams = Streams([(5, k) for k in range(len(SIZES))], CPU, hashed=False)
    bases, weight = numbers(3, segments.rows, 2).cpu(), numbers(len(SIZES), 3, 2, seed=1).cpu()
    found = Packed(segments, bases).mixture(weight, streams.of_round(0), 0.4)
    again = streams.of_round(0)
    kept = torch.stack([again.dropout(basis, 0.4, segments.pointers) for basis in bases])
    expected = (kept * weight[segments.owner].transpose(0, 1)).sum(dim=0)
    torch.testing.assert_close(found, expected)


@usable
@pytest.mark.parametrize("kind", ["adam", "adamw"])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_large_tensors_step_as_in_torch(
    kind: str, decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MANY", 1000)
    used: list[int] = []
    step = kernels.adam_step

    def noted(param: Tensor, *others: Tensor, **options: object) -> None:
        used.append(param.numel())
        step(param, *others, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "adam_step", noted)
    params = {"large": numbers(3, 41, 17), "small": numbers(3, 5, seed=1)}
    theirs = {name: value.double().clone().requires_grad_() for name, value in params.items()}
    classes = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    reference = classes[kind](theirs.values(), lr=0.01, weight_decay=decay)
    spec = OptimizerSpec(kind=kind, lr=0.01, weight_decay=decay)
    ours = Optimizer(spec, params, initial_state(spec, params), even=True)
    for number in range(4):
        grads = {n: numbers(*p.shape, seed=10 + number) for n, p in params.items()}
        for name, value in theirs.items():
            value.grad = grads[name].double()
        ours.step(grads)
        reference.step()
    for name, value in theirs.items():
        torch.testing.assert_close(params[name].double(), value.detach(), rtol=1e-5, atol=1e-6)
    assert used == [3 * 41 * 17] * 4, "only the large tensor has a kernel of its own"
