//! Writes the `/sys`, `/proc` and `/dev` of a known machine below a folder, for `nobounce doctor
//! --root DIR`.

#[path = "../tests/common/plant.rs"]
mod plant;

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = std::env::args().skip(1);
    let (Some(name), Some(folder)) = (words.next(), words.next()) else {
        return Err(format!(
            "usage: plant_tree MACHINE DIR; machines: {}",
            nobounce_topology::machines::NAMES.join(", ")
        )
        .into());
    };
    let facts = nobounce_topology::machines::machine(&name).ok_or("there is no such machine")?;
    plant::plant(&facts, Path::new(&folder))?;
    Ok(())
}
