//! Objects by handle number. Freeing a slot changes its generation, so a stale number matches no
//! new object until the generation wraps.

/// Number of generation bits; the bits above them hold the fork depth of the process that issued
/// the number.
const GENERATION_BITS: u32 = 24;
const GENERATIONS: u32 = 1 << GENERATION_BITS;

/// A number for an object: place + 1, generation, and fork.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Number(pub(crate) u64);

impl Number {
    fn new(fork: u8, generation: u32, place: u32) -> Self {
        Self(u64::from(fork) << 56 | u64::from(generation) << 32 | (u64::from(place) + 1))
    }

    /// Fork depth of the process that issued it.
    pub(crate) fn fork(self) -> u8 {
        self.0.to_be_bytes()[0]
    }

    fn generation(self) -> u32 {
        u32::try_from(self.0 >> 32 & u64::from(GENERATIONS - 1)).unwrap_or(0)
    }

    fn place(self) -> Option<usize> {
        usize::try_from(self.0 & 0xFFFF_FFFF).ok()?.checked_sub(1)
    }
}

struct Place<T> {
    generation: u32,
    object: Option<T>,
}

/// The objects.
pub(crate) struct Slab<T> {
    fork: u8,
    places: Vec<Place<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    pub(crate) fn new(fork: u8) -> Self {
        Self { fork, places: Vec::new(), free: Vec::new() }
    }

    /// Stores an object and returns its number; `None` where there are too many.
    pub(crate) fn insert(&mut self, object: T) -> Option<Number> {
        let place = match self.free.pop() {
            Some(place) => place,
            None => {
                let place = u32::try_from(self.places.len()).ok().filter(|&place| place < u32::MAX)?;
                self.places.push(Place { generation: 0, object: None });
                place
            }
        };
        let found = self.places.get_mut(usize::try_from(place).ok()?)?;
        found.object = Some(object);
        Some(Number::new(self.fork, found.generation, place))
    }

    #[inline]
    pub(crate) fn get(&self, number: Number) -> Option<&T> {
        let place = self.places.get(number.place()?)?;
        let is_same = place.generation == number.generation() && self.fork == number.fork();
        place.object.as_ref().filter(|_| is_same)
    }

    /// Takes an object out; its number means nothing from here on.
    pub(crate) fn remove(&mut self, number: Number) -> Option<T> {
        self.get(number)?;
        let at = number.place()?;
        let place = self.places.get_mut(at)?;
        place.generation = (place.generation + 1) % GENERATIONS;
        self.free.push(u32::try_from(at).ok()?);
        place.object.take()
    }

    /// The numbers of all objects that fulfil a condition.
    pub(crate) fn numbers(&self, which: impl Fn(&T) -> bool) -> Vec<Number> {
        let numbered = self.places.iter().zip(0u32..);
        numbered
            .filter(|(place, _)| place.object.as_ref().is_some_and(&which))
            .map(|(place, at)| Number::new(self.fork, place.generation, at))
            .collect()
    }
}
