"""rows · weightᵀ by our kernel beside torch's, and bit for bit beside itself in other batches."""

from __future__ import annotations

import pytest
import torch

from engine.errors import NativeUnavailable
from engine.native.library import NativeLibrary
from tests.unit.engine.native.kernels import library_or_skip

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def library() -> NativeLibrary:
    return library_or_skip()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_dtype(library: NativeLibrary, dtype: torch.dtype) -> None:
    try:
        library.check_dtype(dtype)
    except NativeUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 31, 32, 33, 64, 577])
@pytest.mark.parametrize("num_outputs", [1, 16, 31, 33, 160])
def test_a_product_of_any_size_is_torchs(library, dtype, has_bias, depth, num_outputs):
    check_dtype(library, dtype)
    weight = random(num_outputs, depth).to(dtype)
    packed = library.pack(weight)
    bias = random(num_outputs, seed=2) if has_bias else None
    for num_rows in (1, 2, 4, 13, 14, 15, 29, 61):
        rows = random(num_rows, depth, seed=num_rows).to(dtype)
        expected = rows.double() @ weight.double().T
        if bias is not None:
            expected = expected + bias
        result = library.multiply(rows, packed, bias)
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_rows_result_is_the_same_bits_however_many_rows_share_the_product(library, dtype, num_threads):
    check_dtype(library, dtype)
    depth, num_rows = 1001, 3000  # rows enough for several blocks of them
    packed = library.pack(random(75, depth).to(dtype))
    rows = random(num_rows, depth, seed=1).to(dtype)
    whole = library.multiply(rows, packed)
    torch.set_num_threads(num_threads)
    try:
        for first, last in ((0, 1), (3, 5), (0, 14), (7, 22), (100, 133), (100, 3000)):
            assert torch.equal(library.multiply(rows[first:last], packed), whole[first:last])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_that_is_a_view_is_packed_as_it_is_seen(library, dtype):
    check_dtype(library, dtype)
    weight, rows = random(48, 40).to(dtype), random(3, 20, seed=1).to(dtype)
    for view in (weight[:, 7:27], random(20, 48).to(dtype).T):
        expected = library.multiply(rows, library.pack(view.clone(memory_format=torch.contiguous_format)))
        assert torch.equal(library.multiply(rows, library.pack(view)), expected)


def test_what_is_not_finite_stays_in_its_row(library):
    rows, packed = random(20, 33), library.pack(random(40, 33, seed=1))
    spoiled = rows.clone()
    spoiled[7, 3] = float("nan")
    result, expected = library.multiply(spoiled, packed), library.multiply(rows, packed)
    assert result[7].isnan().all()
    kept = [row for row in range(20) if row != 7]
    assert torch.equal(result[kept], expected[kept])


def test_a_type_without_kernels_is_refused(library):
    with pytest.raises(NativeUnavailable, match="float16"):
        library.pack(random(4, 4).half())
    with pytest.raises(ValueError, match="do not fit"):
        library.multiply(random(2, 5), library.pack(random(4, 4)))
