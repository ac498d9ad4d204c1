#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| narad::fuzz::target("control_join_frame")(data));
