//! Damaged checkpoints by the thousand: none may crash the readers or make them allocate on a file's word.
//! `cargo run --release --example fuzz_checkpoint -- MINUTES` runs the same for as long as wanted.

mod checkpoint_rig;
#[path = "checkpoint_rig/mutate.rs"]
mod mutate;

use checkpoint_rig::Folder;

#[test]
fn damaged_checkpoints_are_refused_or_opened() {
    let before = mutate::peak_bytes();
    for (seed, name) in
        ["hybrid-tiny", "hybrid-tiny-sharded", "hybrid-geom-awq", "hybrid-geom-ct", "dense-qwen2-tiny"]
            .into_iter()
            .enumerate()
    {
        let folder = Folder::copy_of(name);
        let outcome = mutate::run(folder.path(), seed as u64, 300);
        assert!(outcome.refused > 100, "{name}: {outcome:?}");
        assert!(outcome.opened > 0, "{name}: {outcome:?}");
        assert!(folder.open().is_ok(), "{name}: the files are as they were");
    }
    if let (Some(before), Some(after)) = (before, mutate::peak_bytes()) {
        assert!(after - before < 256 << 20, "memory grew from {before} to {after} bytes");
    }
}
