//! Launchers of the decode kernels: each checks what it was made for, declares its bytes and FLOPs, and puts the kernel on
//! a stream. Arguments are device addresses; who queues a launch keeps the memory alive until it is done.

pub mod attention;
pub mod delta;
pub mod norm;
pub mod sample;
