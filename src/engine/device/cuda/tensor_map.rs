//! Tensor maps: how the copy engine of Hopper and later sees a tensor in global memory.

use cudarc::driver::sys;

use super::driver::check;
use crate::Result;

/// What a kernel takes as `const __grid_constant__ TensorMap` (cuda/cluster.cuh).
#[derive(Debug, Clone, Copy)]
pub struct TensorMap([u64; 16]);

/// What a map says besides shapes.
#[derive(Clone, Copy)]
struct How {
    kind: sys::CUtensorMapDataType,
    /// Of an element.
    bytes: u32,
    /// What a miss brings into the L2.
    promotion: sys::CUtensorMapL2promotion,
    swizzled: bool,
}

impl How {
    fn of(kind: sys::CUtensorMapDataType, bytes: u32) -> Self {
        use sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B as FETCHED;
        Self { kind, bytes, promotion: FETCHED, swizzled: true }
    }
}

impl TensorMap {
    /// Halves at `address`, boxes of `extent` of them, of 128 or 64 bytes along the fastest dimension and swizzled by as many in
    /// shared memory, reads outside giving zeros. Sizes and box are in elements, fastest dimension (contiguous) first;
    /// `strides`, in elements, are of the other three.
    ///
    /// # Errors
    /// The driver's refusal, for strides or an address that are no multiple of 16 bytes or a box that is too large.
    pub fn halves(address: u64, sizes: [u64; 4], strides: [u64; 3], extent: [u32; 4]) -> Result<Self> {
        use sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_FLOAT16 as FLOAT16;
        Self::new(How::of(FLOAT16, 2), address, &sizes, &strides, &extent)
    }

    /// As [`Self::halves`], not swizzled.
    ///
    /// # Errors
    /// A shape that the driver does not take.
    pub fn halves_in_order(
        address: u64,
        sizes: [u64; 4],
        strides: [u64; 3],
        extent: [u32; 4],
    ) -> Result<Self> {
        use sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_FLOAT16 as FLOAT16;
        Self::new(How { swizzled: false, ..How::of(FLOAT16, 2) }, address, &sizes, &strides, &extent)
    }

    /// As [`Self::halves`], fp32.
    ///
    /// # Errors
    /// A shape that the driver does not take.
    pub fn floats(address: u64, sizes: [u64; 4], strides: [u64; 3], extent: [u32; 4]) -> Result<Self> {
        use sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_FLOAT32 as FLOAT32;
        Self::new(How::of(FLOAT32, 4), address, &sizes, &strides, &extent)
    }

    /// A matrix of halves, [rows, columns], rows `stride` elements apart, as boxes of [rows, columns]; otherwise as [`Self::halves`],
    /// and writes outside are left out.
    ///
    /// # Errors
    /// A shape that the driver does not take.
    pub fn halves_matrix(
        address: u64,
        (rows, columns): (usize, usize),
        stride: usize,
        (box_rows, box_columns): (usize, usize),
    ) -> Result<Self> {
        use sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_FLOAT16 as FLOAT16;
        let (sizes, extent) = ([columns as u64, rows as u64], [box_columns as u32, box_rows as u32]);
        Self::new(How::of(FLOAT16, 2), address, &sizes, &[stride as u64], &extent)
    }

    /// As [`Self::halves_matrix`], for boxes of 128 bytes a row that pass through the L2 once. Elsewhere a miss brings 256 bytes, and
    /// of a stream that the L2 is told to drop first it has dropped one half in ten again before that is asked for.
    ///
    /// # Errors
    /// A shape that the driver does not take.
    pub fn streamed_matrix(
        address: u64,
        (rows, columns): (usize, usize),
        (box_rows, box_columns): (usize, usize),
    ) -> Result<Self> {
        use sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_FLOAT16 as FLOAT16;
        use sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_128B as FETCHED;
        let (sizes, extent) = ([columns as u64, rows as u64], [box_columns as u32, box_rows as u32]);
        let how = How { promotion: FETCHED, ..How::of(FLOAT16, 2) };
        Self::new(how, address, &sizes, &[columns as u64], &extent)
    }

    /// As [`Self::halves_matrix`], fp32.
    ///
    /// # Errors
    /// A shape that the driver does not take.
    pub fn floats_matrix(
        address: u64,
        (rows, columns): (usize, usize),
        stride: usize,
        (box_rows, box_columns): (usize, usize),
    ) -> Result<Self> {
        use sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_FLOAT32 as FLOAT32;
        let (sizes, extent) = ([columns as u64, rows as u64], [box_columns as u32, box_rows as u32]);
        Self::new(How::of(FLOAT32, 4), address, &sizes, &[stride as u64], &extent)
    }

    fn new(how: How, address: u64, sizes: &[u64], strides: &[u64], extent: &[u32]) -> Result<Self> {
        use sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE as ZEROS;
        use sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE as PLAIN;
        use sys::CUtensorMapSwizzle_enum::{
            CU_TENSOR_MAP_SWIZZLE_64B as SWIZZLE_64, CU_TENSOR_MAP_SWIZZLE_128B as SWIZZLE_128,
            CU_TENSOR_MAP_SWIZZLE_NONE as IN_ORDER,
        };
        #[repr(C, align(64))]
        struct Aligned([u64; 16]);
        let mut map = Aligned([0; 16]);
        let rank = sizes.len();
        assert!(
            strides.len() + 1 == rank && extent.len() == rank && rank <= 4,
            "sizes, strides and box of one rank"
        );
        let strides: Vec<u64> = strides.iter().map(|stride| u64::from(how.bytes) * stride).collect();
        let steps = [1u32; 4];
        let swizzle = match extent[0] * how.bytes {
            _ if !how.swizzled => IN_ORDER,
            64 => SWIZZLE_64,
            _ => SWIZZLE_128,
        };
        // SAFETY: all arrays have the rank's length or more, and the map the size and alignment of CUtensorMap; no memory behind
        // `address` is touched.
        let code = unsafe {
            sys::cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                how.kind,
                rank as u32,
                address as *mut std::ffi::c_void,
                sizes.as_ptr(),
                strides.as_ptr(),
                extent.as_ptr(),
                steps.as_ptr(),
                PLAIN,
                swizzle,
                how.promotion,
                ZEROS,
            )
        };
        check(code.result(), || {
            format!("describing a tensor of {sizes:?}, strides {strides:?} bytes, boxes of {extent:?}")
        })?;
        Ok(Self(map.0))
    }

    /// For [`super::launch::Arg::Struct`].
    pub fn words(&self) -> &[u64] {
        &self.0
    }

    /// As a field of a structure that a kernel takes.
    pub fn into_words(self) -> [u64; 16] {
        self.0
    }
}
