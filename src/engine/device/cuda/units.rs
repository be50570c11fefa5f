//! Every kernel source in the binary, as units to compile. A new `.cu` file is one entry here; the tests compile each for
//! every target and read its registers and spills.

use super::compile::{ANY_LATER, Unit};

pub const NORM: Unit = Unit {
    file: "norm.cu",
    source: include_str!("../../../../cuda/norm.cu"),
    defines: &[],
    hot: &[
        "embed_norm",
        "add_norm",
        "add_norm_3_parts",
        "add_norm_6_parts",
        "norm_rows_2560",
        "norm_rows_4096",
    ],
    min_capability: 80,
    max_capability: ANY_LATER,
};

pub const PREFILL_ATTENTION: Unit = Unit {
    file: "prefill_attention.cu",
    source: include_str!("../../../../cuda/prefill_attention.cu"),
    defines: &[],
    hot: &["prefill_attention_64", "prefill_attention_128", "prefill_attention_256"],
    min_capability: 80,
    max_capability: ANY_LATER,
};

pub const PREFILL_ATTENTION_HOPPER: Unit = Unit {
    file: "prefill_attention_hopper.cu",
    source: include_str!("../../../../cuda/prefill_attention_hopper.cu"),
    defines: &[],
    hot: &["prefill_attention_128", "prefill_attention_256"],
    min_capability: 90,
    max_capability: 90,
};

pub const DELTA: Unit = Unit {
    file: "delta.cu",
    source: include_str!("../../../../cuda/delta.cu"),
    defines: &[],
    hot: &["delta_f32"],
    min_capability: 80,
    max_capability: ANY_LATER,
};

/// Shared memory for three states of 64 KB: chosen at run time where a block may have that much, as on sm_90 and sm_100.
pub const DELTA_STREAM: Unit = Unit {
    file: "delta_stream.cu",
    source: include_str!("../../../../cuda/delta_stream.cu"),
    defines: &[],
    hot: &["delta_stream", "delta_few", "delta_one"],
    min_capability: 90,
    max_capability: 103,
};

pub const ATTENTION: Unit = Unit {
    file: "attention.cu",
    source: include_str!("../../../../cuda/attention.cu"),
    defines: &[],
    hot: &[
        "attention_rows_64",
        "attention_rows_128",
        "attention_rows_256",
        "attention_prepare_64",
        "attention_prepare_128",
        "attention_prepare_256",
    ],
    min_capability: 80,
    max_capability: ANY_LATER,
};

pub const SAMPLE: Unit = Unit {
    file: "sample.cu",
    source: include_str!("../../../../cuda/sample.cu"),
    defines: &[],
    hot: &["sample_greedy"],
    min_capability: 80,
    max_capability: ANY_LATER,
};

pub const LINEAR: Unit = Unit {
    file: "linear.cu",
    source: include_str!("../../../../cuda/linear.cu"),
    defines: &[],
    hot: &["linear"],
    min_capability: 80,
    max_capability: ANY_LATER,
};

pub const PROBE: Unit = Unit {
    file: "probe.cu",
    source: include_str!("../../../../cuda/probe.cu"),
    defines: &[],
    hot: &["probe_read", "probe_copy", "probe_tensor"],
    min_capability: 80,
    max_capability: ANY_LATER,
};

pub const WEIGHTS: Unit = Unit {
    file: "weights.cu",
    source: include_str!("../../../../cuda/weights.cu"),
    defines: &[],
    hot: &[],
    min_capability: 80,
    max_capability: ANY_LATER,
};

pub const DELTA_PREFILL: Unit = Unit {
    file: "delta_prefill.cu",
    source: include_str!("../../../../cuda/delta_prefill.cu"),
    defines: &[],
    hot: &["delta_prepare", "delta_chunks", "delta_finish"],
    min_capability: 80,
    max_capability: ANY_LATER,
};

pub const DELTA_SCAN: Unit = Unit {
    file: "delta_scan.cu",
    source: include_str!("../../../../cuda/delta_scan.cu"),
    defines: &[],
    hot: &["delta_scan"],
    min_capability: 80,
    max_capability: ANY_LATER,
};

/// Clusters that share what they read, and warpgroup products: where a block may have the shared memory for three stages of it.
pub const DELTA_SCAN_HOPPER: Unit = Unit {
    file: "delta_scan_hopper.cu",
    source: include_str!("../../../../cuda/delta_scan_hopper.cu"),
    defines: &[],
    hot: &["delta_scan"],
    min_capability: 90,
    max_capability: 90,
};

pub const PRODUCTS: Unit = Unit {
    file: "products.cu",
    source: include_str!("../../../../cuda/products.cu"),
    defines: &[],
    hot: &[
        "product_stream_8",
        "product_stream_8_short",
        "product_stream_16",
        "product_stream_32",
        "product_tile_64",
        "product_tile_128",
    ],
    min_capability: 80,
    max_capability: ANY_LATER,
};

pub const PRODUCTS_SMALL: Unit = Unit {
    file: "products_small.cu",
    source: include_str!("../../../../cuda/products_small.cu"),
    defines: &[],
    hot: &super::products::SMALL_NAMES,
    min_capability: 90,
    max_capability: ANY_LATER,
};

/// One for each number of rows of x: a file of many large kernels would be what all others wait for.
pub const PRODUCTS_HOPPER: [Unit; 5] = {
    use super::batch_product::NAMES;
    const ANY: Unit = Unit {
        file: "products_hopper.cu",
        source: include_str!("../../../../cuda/products_hopper.cu"),
        defines: &[],
        hot: &[],
        min_capability: 90,
        max_capability: 90,
    };
    [
        Unit { defines: &[("COLUMNS", "8")], hot: &NAMES[0], ..ANY },
        Unit { defines: &[("COLUMNS", "16")], hot: &NAMES[1], ..ANY },
        Unit { defines: &[("COLUMNS", "32")], hot: &NAMES[2], ..ANY },
        Unit { defines: &[("COLUMNS", "64")], hot: &NAMES[3], ..ANY },
        Unit { defines: &[("COLUMNS", "128")], hot: &NAMES[4], ..ANY },
    ]
};

pub const GEMM_HOPPER: Unit = Unit {
    file: "gemm_hopper.cu",
    source: include_str!("../../../../cuda/gemm_hopper.cu"),
    defines: &[],
    hot: &[super::gemm::NAME],
    min_capability: 90,
    max_capability: 90,
};

/// One for each number of rows of W.
pub const PRODUCTS_WIDE: [Unit; 5] = {
    use super::batch_product::WIDE_NAMES as NAMES;
    const ANY: Unit = Unit {
        file: "products_wide.cu",
        source: include_str!("../../../../cuda/products_wide.cu"),
        defines: &[],
        hot: &[],
        min_capability: 90,
        max_capability: 90,
    };
    [
        Unit { defines: &[("TALLEST", "80")], hot: &NAMES[0], ..ANY },
        Unit { defines: &[("TALLEST", "96")], hot: &NAMES[1], ..ANY },
        Unit { defines: &[("TALLEST", "112")], hot: &NAMES[2], ..ANY },
        Unit { defines: &[("TALLEST", "128")], hot: &NAMES[3], ..ANY },
        Unit { defines: &[("TALLEST", "144")], hot: &NAMES[4], ..ANY },
    ]
};

pub const INT4: Unit = Unit {
    file: "int4.cu",
    source: include_str!("../../../../cuda/int4.cu"),
    defines: &[],
    hot: &[
        "int4_stream_8",
        "int4_stream_8_short",
        "int4_stream_8_small_groups",
        "int4_stream_16",
        "int4_stream_32",
        "int4_tile_64",
        "int4_tile_128",
    ],
    min_capability: 80,
    max_capability: ANY_LATER,
};

pub const INT4_RING: Unit = Unit {
    file: "int4_ring_hopper.cu",
    source: include_str!("../../../../cuda/int4_ring_hopper.cu"),
    defines: &[],
    hot: super::products::INT4_RING_NAMES,
    min_capability: 90,
    max_capability: 90,
};

pub const INT4_BATCH: Unit = Unit {
    file: "int4_batch_hopper.cu",
    source: include_str!("../../../../cuda/int4_batch_hopper.cu"),
    defines: &[],
    hot: super::products::INT4_BATCH_NAMES,
    min_capability: 90,
    max_capability: 90,
};

/// The same for groups of less than 128 columns.
pub const INT4_BATCH_SMALL_GROUPS: Unit = Unit { defines: &[("GROUP_SCALES", "4")], ..INT4_BATCH };

pub const INT4_PACK: Unit = Unit {
    file: "int4_pack.cu",
    source: include_str!("../../../../cuda/int4_pack.cu"),
    defines: &[],
    hot: &[],
    min_capability: 80,
    max_capability: ANY_LATER,
};

/// All of them, about those first that take the compiler longest.
pub const ALL: &[&Unit] = &[
    &ATTENTION,
    &INT4,
    &DELTA,
    &PRODUCTS_WIDE[4],
    &PRODUCTS_WIDE[3],
    &PRODUCTS_WIDE[2],
    &PRODUCTS_WIDE[1],
    &PRODUCTS_WIDE[0],
    &PRODUCTS_HOPPER[4],
    &PRODUCTS_HOPPER[3],
    &PRODUCTS_HOPPER[2],
    &PRODUCTS_HOPPER[1],
    &PRODUCTS_HOPPER[0],
    &PRODUCTS,
    &PRODUCTS_SMALL,
    &GEMM_HOPPER,
    &INT4_RING,
    &INT4_BATCH,
    &INT4_BATCH_SMALL_GROUPS,
    &INT4_PACK,
    &NORM,
    &DELTA_STREAM,
    &SAMPLE,
    &WEIGHTS,
    &PROBE,
    &LINEAR,
    &PREFILL_ATTENTION,
    &PREFILL_ATTENTION_HOPPER,
    &DELTA_PREFILL,
    &DELTA_SCAN,
    &DELTA_SCAN_HOPPER,
];
