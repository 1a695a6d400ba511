"""The most that devices can do comes from the user, a data sheet or a measurement, in this order."""

import jax
import pytest

from jformer.parallel.backend import Target
from jformer.parallel.devices import arithmetic, find_peak, known_peak, measured_peak, quicker_dtype


@pytest.mark.parametrize(
    ("kind", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2_250),
        ("TPU v4", 275),
        ("TPU v4 lite", 138),
        ("TPU v5 lite", 197),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
    ],
)
def test_data_sheets_are_found_by_the_kind_of_device(kind, tera):
    assert known_peak(kind, "bfloat16") == tera * 1e12


@pytest.mark.parametrize(
    "kind", ["NVIDIA L40", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla V100-SXM2-16GB", "cpu", "TPU v50"]
)
def test_no_other_kind_is_taken_for_one_on_sale(kind):
    assert known_peak(kind, "bfloat16") is None


def test_float32_is_no_figure_of_a_data_sheet():
    assert known_peak("NVIDIA H100 80GB HBM3", "float32") is None


class Chip:
    platform, device_kind = "tpu", "TPU v5 lite"


def test_all_devices_count_and_the_user_has_the_last_word():
    assert find_peak(Chip, 4, "bfloat16") == (4 * 197e12, "data sheet of TPU v5 lite, bfloat16")
    assert find_peak(Chip, 1, "bfloat16").flops == 197e12
    assert find_peak(Chip, 4, "float32", given=1e12) == (4e12, "train.peak_flops")


def test_devices_of_a_cpu_share_what_is_measured(monkeypatch):
    monkeypatch.setattr("jformer.parallel.devices.measured_peak", lambda device, dtype, precision: 7.0)
    assert find_peak(jax.devices()[0], jax.device_count(), "float32") == (7.0, "measured by matrix products in float32")


def test_a_product_is_measured():
    assert 1e8 < measured_peak(jax.devices()[0], "float32") < 1e14


@pytest.mark.parametrize(("gain", "dtype", "share"), [(1.4, "float32", "0.71"), (1.6, "bfloat16", "0.62")])
def test_bfloat16_is_taken_where_its_products_are_much_quicker(monkeypatch, gain, dtype, share):
    peaks = {"float32": 2.0, "bfloat16": 2.0 * gain}
    monkeypatch.setattr("jformer.parallel.devices.measured_peak", lambda device, dtype: peaks[dtype])
    reason = f"measured here: products in bfloat16 take {share} times those in float32"
    assert quicker_dtype.__wrapped__(jax.devices()[0]) == (dtype, reason)


def test_a_device_sold_for_bfloat16_need_not_be_measured():
    assert quicker_dtype(Chip) == ("bfloat16", "data sheet of TPU v5 lite")


@pytest.mark.parametrize(
    ("platform", "default", "high", "highest"),
    [
        ("cpu", "float32", "float32", "float32"),
        ("gpu", "tf32", "tf32", "float32"),
        ("tpu", "bfloat16", "bfloat16 x 3", "float32"),
    ],
)
def test_the_precision_decides_what_float32_is_multiplied_in(platform, default, high, highest):
    device = Target(platform)
    found = [arithmetic("float32", device, name) for name in ("default", "high", "highest")]
    assert found == [default, high, highest]
    assert arithmetic("bfloat16", device, "highest") == "bfloat16"
    aliases = {"bfloat16": default, "tensorfloat32": high, "float32": highest, "highest": highest}
    for name, used in aliases.items():
        with jax.default_matmul_precision(name):  # as JAX_DEFAULT_MATMUL_PRECISION sets
            assert (arithmetic("float32", device), arithmetic("float32", device, "highest")) == (used, highest)


def test_gpus_without_tf32_multiply_in_float32():
    assert [arithmetic("float32", Target("gpu", "", each)) for each in ("7.5", "8.0")] == ["float32", "tf32"]
