//! The pools of a session: paged K and V, recurrent states and convolution windows.
//!
//! K lies in tiles of 16 tokens, `[block][kv_head][tile][head_dim][16]`: scores of 16 keys are one register, no sum across
//! lanes. V lies `[block][kv_head][token][head_dim padded to 32]`. A state is `[value_head][value_dim / 16][key_dim][16]`: lanes
//! run over value dims, which never mix. A window is `[tokens][channels]`, oldest first.
//!
//! Rows of a block past the context are whatever they were; attention never multiplies them with anything but a zero
//! weight, and they are finite.

use super::gemm::Element;
use super::isa::LANES;
use super::memory::Buffer;
use crate::engine::config::CacheDtype;
use crate::engine::device::CachePlan;
use crate::engine::model::spec::{DeltaNet, ModelSpec};
use crate::{Error, Result};

pub fn element(dtype: CacheDtype) -> Element {
    match dtype {
        CacheDtype::F16 => Element::F16,
        CacheDtype::Bf16 => Element::Bf16,
        CacheDtype::Auto | CacheDtype::F32 => Element::F32,
    }
}

/// Stores an f32 as `element` at index `at`.
///
/// # Safety
/// `base` covers the element.
#[inline(always)]
pub unsafe fn store(element: Element, base: *mut u8, at: usize, value: f32) {
    // SAFETY: promised by the caller.
    unsafe {
        match element {
            Element::F32 => base.cast::<f32>().add(at).write(value),
            Element::F16 => base.cast::<u16>().add(at).write(half::f16::from_f32(value).to_bits()),
            Element::Bf16 | Element::Bf16Pairs => {
                base.cast::<u16>().add(at).write(half::bf16::from_f32(value).to_bits());
            }
        }
    }
}

/// Loads element `at` as f32.
///
/// # Safety
/// `base` covers the element.
#[inline(always)]
pub unsafe fn fetch(element: Element, base: *const u8, at: usize) -> f32 {
    // SAFETY: promised by the caller.
    unsafe {
        match element {
            Element::F32 => base.cast::<f32>().add(at).read(),
            Element::F16 => half::f16::from_bits(base.cast::<u16>().add(at).read()).to_f32(),
            Element::Bf16 | Element::Bf16Pairs => {
                half::bf16::from_bits(base.cast::<u16>().add(at).read()).to_f32()
            }
        }
    }
}

/// K and V of every attention layer.
pub struct KvPool {
    pub element: Element,
    pub block_tokens: usize,
    pub blocks: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// head_dim padded to whole panels.
    pub value_stride: usize,
    /// Tiles of 16 tokens in a block.
    tiles: usize,
    layers: Vec<(Buffer, Buffer)>,
}

impl KvPool {
    pub fn new(spec: &ModelSpec, plan: &CachePlan) -> Result<Self> {
        let element = element(plan.kv_dtype);
        let attention = &spec.attention;
        let tiles = plan.block_tokens.div_ceil(LANES);
        let value_stride = attention.head_dim.next_multiple_of(2 * LANES);
        let rows = plan.kv_blocks * attention.kv_heads * tiles * LANES;
        let layers = (0..spec.attention_layers())
            .map(|_| {
                let bytes = rows * element.bytes();
                Ok((Buffer::zeroed(bytes * attention.head_dim)?, Buffer::zeroed(bytes * value_stride)?))
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            element,
            block_tokens: plan.block_tokens,
            blocks: plan.kv_blocks,
            kv_heads: attention.kv_heads,
            head_dim: attention.head_dim,
            value_stride,
            tiles,
            layers,
        })
    }

    /// The K tile that holds a token of a block: [head_dim][16].
    #[inline(always)]
    pub fn key_tile(&self, layer: usize, block: usize, head: usize, token: usize) -> *mut u8 {
        debug_assert!(block < self.blocks && head < self.kv_heads && token < self.block_tokens);
        let tile = (block * self.kv_heads + head) * self.tiles + token / LANES;
        // SAFETY: the indices are in bounds, so the tile lies in the layer's buffer.
        unsafe { self.layers[layer].0.as_mut_ptr().add(tile * self.head_dim * LANES * self.element.bytes()) }
    }

    /// The V row of a token of a block: [value_stride].
    #[inline(always)]
    pub fn value_row(&self, layer: usize, block: usize, head: usize, token: usize) -> *mut u8 {
        debug_assert!(block < self.blocks && head < self.kv_heads && token < self.block_tokens);
        let row = (block * self.kv_heads + head) * self.tiles * LANES + token;
        // SAFETY: the indices are in bounds, so the row lies in the layer's buffer.
        unsafe { self.layers[layer].1.as_mut_ptr().add(row * self.value_stride * self.element.bytes()) }
    }

    /// Bytes of K and of V of one block and head.
    pub fn block_bytes(&self) -> (usize, usize) {
        let slots = self.tiles * LANES * self.element.bytes();
        (slots * self.head_dim, slots * self.value_stride)
    }

    /// Stores the K and V of one token and head.
    ///
    /// # Safety
    /// No other thread touches this token's rows.
    #[inline(always)]
    pub unsafe fn write(
        &self,
        layer: usize,
        block: usize,
        head: usize,
        token: usize,
        key: &[f32],
        value: &[f32],
    ) {
        let tile = self.key_tile(layer, block, head, token);
        let row = self.value_row(layer, block, head, token);
        for (d, (&key, &value)) in key.iter().zip(value).enumerate() {
            // SAFETY: d < head_dim, inside tile and row; the caller promises that nobody else is there.
            unsafe {
                store(self.element, tile, d * LANES + token % LANES, key);
                store(self.element, row, d, value);
            }
        }
    }
}

/// What a slot holds, besides its memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct SlotMeta {
    /// Tokens the stored state has processed.
    pub tokens: usize,
    /// Drafted tokens whose inputs lie in the stash; they follow `tokens`.
    pub stashed: usize,
}

/// Recurrent states, convolution windows and the stash of drafted tokens' inputs.
pub struct StatePool {
    pub element: Element,
    pub slots: Vec<SlotMeta>,
    pub delta: DeltaNet,
    /// value_dim in tiles of 16.
    pub value_tiles: usize,
    pub max_drafts: usize,
    states: Vec<Buffer>,
    windows: Vec<Buffer>,
    /// [slots][drafts][`DeltaNet::token_elements`], where there are drafts.
    stashes: Vec<Buffer>,
}

impl StatePool {
    pub fn new(delta: &DeltaNet, layers: usize, plan: &CachePlan) -> Result<Self> {
        let element = element(plan.state_dtype);
        let value_tiles = delta.value_dim.div_ceil(LANES);
        let mut pool = Self {
            element,
            slots: vec![SlotMeta::default(); plan.state_slots],
            delta: delta.clone(),
            value_tiles,
            max_drafts: plan.max_drafts,
            states: Vec::new(),
            windows: Vec::new(),
            stashes: Vec::new(),
        };
        for _ in 0..layers {
            let slots = plan.state_slots;
            let heads = slots * delta.value_heads;
            pool.states.push(Buffer::zeroed(heads * pool.head_elements() * element.bytes())?);
            pool.windows.push(Buffer::zeroed(slots * delta.window_elements() * 4)?);
            if plan.max_drafts > 0 {
                let stash_bytes = slots * plan.max_drafts * delta.token_elements() * size_of::<f32>();
                pool.stashes.push(Buffer::zeroed(stash_bytes)?);
            }
        }
        Ok(pool)
    }

    /// Elements of one value head's state, padded.
    pub fn head_elements(&self) -> usize {
        self.value_tiles * self.delta.key_dim * LANES
    }

    pub fn state(&self, layer: usize, slot: usize, value_head: usize) -> *mut u8 {
        let head = slot * self.delta.value_heads + value_head;
        debug_assert!(slot < self.slots.len() && value_head < self.delta.value_heads);
        // SAFETY: in bounds by the indices.
        unsafe { self.states[layer].as_mut_ptr().add(head * self.head_elements() * self.element.bytes()) }
    }

    /// [conv_width - 1][channels] of a slot.
    pub fn window(&self, layer: usize, slot: usize) -> *mut f32 {
        debug_assert!(slot < self.slots.len());
        // SAFETY: in bounds by the slot.
        unsafe { self.windows[layer].as_mut_ptr().cast::<f32>().add(slot * self.delta.window_elements()) }
    }

    /// The stashed row of a drafted token.
    pub fn stash(&self, layer: usize, slot: usize, draft: usize) -> *mut f32 {
        debug_assert!(slot < self.slots.len() && draft < self.max_drafts);
        // SAFETY: in bounds by slot and draft.
        unsafe {
            let row = (slot * self.max_drafts + draft) * self.delta.token_elements();
            self.stashes[layer].as_mut_ptr().cast::<f32>().add(row)
        }
    }

    /// How many stashed tokens a step that starts at `context` must replay into the state first.
    ///
    /// # Errors
    /// The slot's state cannot be brought to `context`: the caller's bookkeeping is wrong.
    pub fn replay(&self, slot: usize, context: usize) -> Result<usize> {
        let meta = self.slots[slot];
        match context.checked_sub(meta.tokens) {
            _ if context == 0 => Ok(0),
            Some(replay) if replay <= meta.stashed => Ok(replay),
            _ => Err(Error::failed(
                format!(
                    "state slot {slot} holds {} tokens and {} drafts, a step asks for {context}",
                    meta.tokens, meta.stashed
                ),
                "this is a fault of the program: please report it",
            )),
        }
    }
}
