//! Imitated `/proc` and `/sys` for tests.

use std::fs;
use std::path::PathBuf;

/// Files below a directory that goes away with the test.
pub(crate) struct Tree(pub PathBuf);

impl Tree {
    pub(crate) fn new(test: &str, files: &[(&str, &str)]) -> Tree {
        let top = std::env::temp_dir().join(format!("narad-tree-{}-{test}", std::process::id()));
        let _ = fs::remove_dir_all(&top);
        fs::create_dir_all(&top).unwrap();
        let tree = Tree(top);
        files.iter().for_each(|(name, text)| tree.write(name, text));
        tree
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    /// A machine of two packages, each a NUMA node, with two cores of two threads: CPUs 0-3, and 4-7 their siblings.
    pub(crate) fn two_packages(test: &str) -> Tree {
        let tree = Tree::new(test, &[("devices/system/cpu/online", "0-7"), ("devices/system/cpu/isolated", "")]);
        for cpu in 0..8u32 {
            let (core, package) = (cpu % 4, cpu % 4 / 2);
            let file = |name: &str| format!("devices/system/cpu/cpu{cpu}/topology/{name}");
            tree.write(&file("physical_package_id"), &package.to_string());
            tree.write(&file("core_id"), &(core % 2).to_string());
            tree.write(&file("thread_siblings_list"), &format!("{core},{}", core + 4));
        }
        tree.write("devices/system/node/node0/cpulist", "0-1,4-5");
        tree.write("devices/system/node/node1/cpulist", "2-3,6-7");
        tree.write("devices/system/cpu/nohz_full", "(null)");
        tree
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
