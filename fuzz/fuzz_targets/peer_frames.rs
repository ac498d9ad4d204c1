#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| narad::fuzz::target("peer_frames")(data));
