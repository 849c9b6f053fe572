//! Arithmetic behind CRC-32: polynomials over GF(2), modulo the generator.
//!
//! A CRC register is such a polynomial, and feeding it one zero byte multiplies it by x^8. So the
//! effect of a change anywhere in a packet can be carried to the packet's end, or back, by one
//! multiplication, without its bytes. Bits are reflected as in the CRC: bit 31 is x^0, bit 0 is
//! x^31.

const GENERATOR: u32 = 0xedb8_8320;
const ONE: u32 = 1 << 31;
/// x^8: what one byte multiplies by.
const BYTE: u32 = ONE >> 8;
/// The generator is primitive: x^(2^32 - 1) = 1, and 8 shares no factor with the exponent.
const ORDER: u64 = u32::MAX as u64;

/// `POWERS[k][j]` = x^(8 * 64^k * j): one table row for each 6-bit digit of a byte count.
static POWERS: [[u32; 64]; 6] = powers();

/// The product of two polynomials. Takes as many steps as `a` has bits from the top down to its
/// lowest set one.
pub(super) const fn mul(mut a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    while a != 0 {
        // Masks instead of branches: the bits are random, a predictor would miss half of them.
        product ^= b & (a >> 31).wrapping_neg();
        a <<= 1;
        b = (b >> 1) ^ (GENERATOR & (b & 1).wrapping_neg());
    }
    product
}

/// The factor that carries a register past `bytes` zero bytes.
pub(super) fn forward(bytes: usize) -> u32 {
    power(reduce(bytes))
}

/// The factor that carries a register back over `bytes` zero bytes.
pub(super) fn backward(bytes: usize) -> u32 {
    power(ORDER - reduce(bytes))
}

fn reduce(bytes: usize) -> u64 {
    // A usize wider than 64 bits does not exist; the fallback keeps the function total.
    u64::try_from(bytes).unwrap_or(0) % ORDER
}

fn power(mut bytes: u64) -> u32 {
    let mut product = ONE;
    for row in &POWERS {
        let digit = usize::try_from(bytes & 63).unwrap_or(0);
        if digit != 0 {
            product = mul(product, row[digit]);
        }
        bytes >>= 6;
    }
    product
}

const fn powers() -> [[u32; 64]; 6] {
    let mut table = [[ONE; 64]; 6];
    let mut base = BYTE;
    let mut row = 0;
    while row < 6 {
        let mut digit = 1;
        while digit < 64 {
            table[row][digit] = mul(table[row][digit - 1], base);
            digit += 1;
        }
        base = mul(table[row][63], base);
        row += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forward_is_what_zero_bytes_do_to_a_difference() {
        for len in [0, 1, 2, 63, 64, 65, 4096, 70_000] {
            let zeros = vec![0; len];
            let crc = |start| {
                let mut hasher = crc32fast::Hasher::new_with_initial(start);
                hasher.update(&zeros);
                hasher.finalize()
            };
            let difference = 0x1234_5678;
            assert_eq!(mul(difference, forward(len)), crc(99) ^ crc(99 ^ difference), "{len} bytes");
        }
    }

    #[test]
    fn backward_undoes_forward() {
        for len in [0, 1, 48, 4132, 65_535, 1 << 30, usize::MAX] {
            assert_eq!(mul(forward(len), backward(len)), ONE, "{len} bytes");
        }
    }
}
