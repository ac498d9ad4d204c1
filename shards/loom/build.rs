//! The one file under test is compiled with loom's atomics here, and with the real ones in `narad-shards`.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(loom)");
    println!("cargo::rustc-cfg=loom");
}
