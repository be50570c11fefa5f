//! A model as files describe it: its shape ([`spec`]), the formats its weights are stored in ([`layout`]) and where
//! their bytes come from ([`weights`]).

pub mod layout;
pub mod spec;
pub mod weights;
