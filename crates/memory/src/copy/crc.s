# Guarded loads that also compute the CRC-32 of what they moved: fn(dst: rdi, src: rsi, len: rdx, state: ecx, out: r8) -> rax =
# bytes not copied. `state` is the register of the CRC (not inverted); the new one goes to the 8 bytes at `out`, unless a fault came
# in between. See crc.rs for the method. Intel syntax; nothing here uses the stack.
#
# Position and length are advanced after each access. After a fault the plain load goes on from there: it copies what can be
# copied, meets the fault itself, and reports how far it got.

    .pushsection .text.nobounce_memory, "ax", @progbits

    .macro nb_crc_advance count
    add rsi, \count
    add rdi, \count
    sub rdx, \count
    .endm

# \acc = \acc moved on by the distance of \constant, plus \more.
    .macro nb_crc_fold512 acc, constant, more, t0
    vpclmulqdq \t0, \acc, \constant, 0x00
    vpclmulqdq \acc, \acc, \constant, 0x11
    vpternlogq \acc, \t0, \more, 0x96
    .endm

    .macro nb_crc_fold128 acc, constant, more, t0
    movdqa \t0, \acc
    pclmulqdq \t0, \constant, 0x00
    pclmulqdq \acc, \constant, 0x11
    pxor \acc, \t0
    pxor \acc, \more
    .endm

# 128 bits in xmm0 (and nothing else of interest) to 32 bits, by Barrett's method.
    .macro nb_crc_reduce
    movdqa xmm1, xmm0
    pclmulqdq xmm1, xmmword ptr [rip + .Lnb_crc_d128], 0x10
    psrldq xmm0, 8
    pxor xmm0, xmm1
    movq xmm2, qword ptr [rip + .Lnb_crc_low32]
    movdqa xmm1, xmm0
    pand xmm1, xmm2
    pclmulqdq xmm1, xmmword ptr [rip + .Lnb_crc_d64], 0x00
    psrldq xmm0, 4
    pxor xmm0, xmm1
    movdqa xmm1, xmm0
    pand xmm1, xmm2
    pclmulqdq xmm1, xmmword ptr [rip + .Lnb_crc_barrett], 0x10
    pand xmm1, xmm2
    pclmulqdq xmm1, xmmword ptr [rip + .Lnb_crc_barrett], 0x00
    pxor xmm0, xmm1
    movq rax, xmm0
    shr rax, 32
    mov qword ptr [r8], rax
    xor eax, eax
    .endm

    .macro nb_crc_start name
    .p2align 6
    .globl nobounce_memory_\name
    .hidden nobounce_memory_\name
    .type nobounce_memory_\name, @function
nobounce_memory_\name\():
    .cfi_startproc
    .endm

    .macro nb_crc_end name
    .cfi_endproc
.Lnb_\name\()_end:
    .size nobounce_memory_\name, . - nobounce_memory_\name
    .endm

# 64-byte vectors; at least 128 bytes, at any address.
    nb_crc_start load_crc512
    vmovd xmm4, ecx
    vpxor xmm0, xmm0, xmm0
    vmovdqa64 zmm7, zmmword ptr [rip + .Lnb_crc_iota]
    vbroadcasti32x4 zmm6, xmmword ptr [rip + .Lnb_crc_d512]
    mov ecx, esi
    and ecx, 63
    jz .Lnb_crc512_body
    # The head: the end of an aligned block, as if zeros came before it, which a CRC of state 0 does not notice. The state belongs
    # to the first four bytes of the message; turned to where they are, what does not fit comes out at the start of the next block.
    mov rax, -1
    shl rax, cl
    kmovq k1, rax
    knotq k2, k1
    vpbroadcastb zmm5, ecx
    vpsubb zmm5, zmm7, zmm5
    vpermb zmm5, zmm5, zmm4
    mov rax, rsi
    mov r11, rdi
    sub rax, rcx
    sub r11, rcx
    vmovdqu8 zmm0 {k1} {z}, zmmword ptr [rax]
    vmovdqu8 zmmword ptr [r11] {k1}, zmm0
    vmovdqu8 zmm4 {k1} {z}, zmm5
    vpxorq zmm0, zmm0, zmm4
    vmovdqu8 zmm4 {k2} {z}, zmm5
    neg rcx
    add rcx, 64
    nb_crc_advance rcx
    # src is a multiple of 64 from here on. zmm0: the block before, zmm4: state still to be added to the next block.
.Lnb_crc512_body:
    cmp rdx, 256
    jb .Lnb_crc512_single
    vmovdqu64 zmm16, zmmword ptr [rsi]
    vmovdqu64 zmm1, zmmword ptr [rsi + 64]
    vmovdqu64 zmm2, zmmword ptr [rsi + 128]
    vmovdqu64 zmm3, zmmword ptr [rsi + 192]
    vmovdqu64 zmmword ptr [rdi], zmm16
    vmovdqu64 zmmword ptr [rdi + 64], zmm1
    vmovdqu64 zmmword ptr [rdi + 128], zmm2
    vmovdqu64 zmmword ptr [rdi + 192], zmm3
    nb_crc_advance 256
    vpxorq zmm16, zmm16, zmm4
    nb_crc_fold512 zmm0, zmm6, zmm16, zmm17
    vpxor xmm4, xmm4, xmm4
    cmp rdx, 256
    jb .Lnb_crc512_join
    vbroadcasti32x4 zmm5, xmmword ptr [rip + .Lnb_crc_d2048]
    .p2align 5
.Lnb_crc512_four:
    vmovdqu64 zmm16, zmmword ptr [rsi]
    vmovdqu64 zmm17, zmmword ptr [rsi + 64]
    vmovdqu64 zmm18, zmmword ptr [rsi + 128]
    vmovdqu64 zmm19, zmmword ptr [rsi + 192]
    vmovdqu64 zmmword ptr [rdi], zmm16
    vmovdqu64 zmmword ptr [rdi + 64], zmm17
    vmovdqu64 zmmword ptr [rdi + 128], zmm18
    vmovdqu64 zmmword ptr [rdi + 192], zmm19
    nb_crc_fold512 zmm0, zmm5, zmm16, zmm20
    nb_crc_fold512 zmm1, zmm5, zmm17, zmm21
    nb_crc_fold512 zmm2, zmm5, zmm18, zmm22
    nb_crc_fold512 zmm3, zmm5, zmm19, zmm23
    nb_crc_advance 256
    cmp rdx, 256
    jae .Lnb_crc512_four
.Lnb_crc512_join:
    vbroadcasti32x4 zmm16, xmmword ptr [rip + .Lnb_crc_d1536]
    vbroadcasti32x4 zmm17, xmmword ptr [rip + .Lnb_crc_d1024]
    nb_crc_fold512 zmm0, zmm16, zmm3, zmm18
    nb_crc_fold512 zmm1, zmm17, zmm0, zmm19
    vmovdqa64 zmm0, zmm1
    nb_crc_fold512 zmm2, zmm6, zmm0, zmm20
    vmovdqa64 zmm0, zmm2
.Lnb_crc512_single:
    cmp rdx, 64
    jb .Lnb_crc512_tail
    vmovdqu64 zmm1, zmmword ptr [rsi]
    vmovdqu64 zmmword ptr [rdi], zmm1
    nb_crc_advance 64
    vpxorq zmm1, zmm1, zmm4
    nb_crc_fold512 zmm0, zmm6, zmm1, zmm2
    vpxor xmm4, xmm4, xmm4
    jmp .Lnb_crc512_single
.Lnb_crc512_tail:
    test edx, edx
    jz .Lnb_crc512_finish
    # The tail: the last 64 bytes of (zmm0, tail), and before them what zmm0 had to give up, behind zeros.
    mov ecx, edx
    mov rax, -1
    shl rax, cl
    not rax
    kmovq k1, rax
    vmovdqu8 zmm1 {k1} {z}, zmmword ptr [rsi]
    vmovdqu8 zmmword ptr [rdi] {k1}, zmm1
    vpbroadcastb zmm2, ecx
    vpaddb zmm2, zmm2, zmm7
    vpermb zmm0, zmm2, zmm0
    vpermb zmm1, zmm2, zmm1
    neg ecx
    mov rax, -1
    shl rax, cl
    kmovq k1, rax
    knotq k2, k1
    vmovdqu8 zmm2 {k2} {z}, zmm0
    vmovdqu8 zmm0 {k1} {z}, zmm0
    vpxorq zmm1, zmm1, zmm2
    nb_crc_fold512 zmm0, zmm6, zmm1, zmm3
.Lnb_crc512_finish:
    # Four lanes to the last of them.
    vmovdqa64 zmm1, zmmword ptr [rip + .Lnb_crc_lanes]
    vextracti32x4 xmm3, zmm0, 3
    vpclmulqdq zmm2, zmm0, zmm1, 0x00
    vpclmulqdq zmm0, zmm0, zmm1, 0x11
    vpxorq zmm0, zmm0, zmm2
    vextracti64x4 ymm1, zmm0, 1
    vpxor ymm0, ymm0, ymm1
    vextracti128 xmm1, ymm0, 1
    vpternlogq zmm0, zmm1, zmm3, 0x96
    vzeroupper
    nb_crc_reduce
    ret
.Lnb_crc512_fix:
    vzeroupper
    mov ecx, 1
    jmp nobounce_memory_load
    nb_crc_end load_crc512

# 16-byte vectors; src a multiple of 16, len a multiple of 16 and at least 64.
    nb_crc_start load_crc128
    movd xmm4, ecx
    movdqa xmm6, xmmword ptr [rip + .Lnb_crc_d128]
    movdqa xmm5, xmmword ptr [rip + .Lnb_crc_d512]
    movdqu xmm0, xmmword ptr [rsi]
    movdqu xmm1, xmmword ptr [rsi + 16]
    movdqu xmm2, xmmword ptr [rsi + 32]
    movdqu xmm3, xmmword ptr [rsi + 48]
    movdqu xmmword ptr [rdi], xmm0
    movdqu xmmword ptr [rdi + 16], xmm1
    movdqu xmmword ptr [rdi + 32], xmm2
    movdqu xmmword ptr [rdi + 48], xmm3
    nb_crc_advance 64
    pxor xmm0, xmm4
    jmp .Lnb_crc128_more
    .p2align 5
.Lnb_crc128_four:
    movdqu xmm8, xmmword ptr [rsi]
    movdqu xmm9, xmmword ptr [rsi + 16]
    movdqu xmm10, xmmword ptr [rsi + 32]
    movdqu xmm11, xmmword ptr [rsi + 48]
    movdqu xmmword ptr [rdi], xmm8
    movdqu xmmword ptr [rdi + 16], xmm9
    movdqu xmmword ptr [rdi + 32], xmm10
    movdqu xmmword ptr [rdi + 48], xmm11
    nb_crc_advance 64
    nb_crc_fold128 xmm0, xmm5, xmm8, xmm12
    nb_crc_fold128 xmm1, xmm5, xmm9, xmm13
    nb_crc_fold128 xmm2, xmm5, xmm10, xmm14
    nb_crc_fold128 xmm3, xmm5, xmm11, xmm15
.Lnb_crc128_more:
    cmp rdx, 64
    jae .Lnb_crc128_four
    nb_crc_fold128 xmm0, xmm6, xmm1, xmm12
    nb_crc_fold128 xmm0, xmm6, xmm2, xmm12
    nb_crc_fold128 xmm0, xmm6, xmm3, xmm12
.Lnb_crc128_single:
    cmp rdx, 16
    jb .Lnb_crc128_finish
    movdqu xmm1, xmmword ptr [rsi]
    movdqu xmmword ptr [rdi], xmm1
    nb_crc_advance 16
    nb_crc_fold128 xmm0, xmm6, xmm1, xmm12
    jmp .Lnb_crc128_single
.Lnb_crc128_finish:
    nb_crc_reduce
    ret
.Lnb_crc128_fix:
    xor ecx, ecx
    jmp nobounce_memory_load
    nb_crc_end load_crc128
    .popsection

    .pushsection .rodata.nobounce_memory, "a", @progbits
    .p2align 6
.Lnb_crc_iota:
    .byte 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31
    .byte 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63
    # To move 128 bits on by d bits: x^(d + 32) and x^(d - 32) modulo the polynomial, bits reversed, times two. For the four lanes
    # of a vector (the last stays where it is), then each distance by itself.
.Lnb_crc_lanes:
    .quad 0x03db1ecdc, 0x174359406
    .quad 0x0f1da05aa, 0x15a546366
    .quad 0x1751997d0, 0x0ccaa009e
    .quad 0, 0
.Lnb_crc_d2048:
    .quad 0x11542778a, 0x1322d1430
.Lnb_crc_d1536:
    .quad 0x1821d8bc0, 0x12e958ac4
.Lnb_crc_d1024:
    .quad 0x1e88ef372, 0x14a7fe880
.Lnb_crc_d512:
    .quad 0x154442bd4, 0x1c6e41596
.Lnb_crc_d128:
    .quad 0x1751997d0, 0x0ccaa009e
    # x^64, for the step from 96 bits to 64.
.Lnb_crc_d64:
    .quad 0x163cd6124, 0
    # The polynomial, and x^64 divided by it.
.Lnb_crc_barrett:
    .quad 0x1db710641, 0x1f7011641
.Lnb_crc_low32:
    .quad 0x0ffffffff, 0

    .p2align 2
    .globl nobounce_memory_crc_fixups
    .hidden nobounce_memory_crc_fixups
    .type nobounce_memory_crc_fixups, @object
nobounce_memory_crc_fixups:
    .irp width, 512, 128
    .long nobounce_memory_load_crc\width - nobounce_memory_crc_fixups
    .long .Lnb_load_crc\width\()_end - nobounce_memory_crc_fixups
    .long .Lnb_crc\width\()_fix - nobounce_memory_crc_fixups
    .endr
    .size nobounce_memory_crc_fixups, . - nobounce_memory_crc_fixups
    .popsection

    .purgem nb_crc_advance
    .purgem nb_crc_fold512
    .purgem nb_crc_fold128
    .purgem nb_crc_reduce
    .purgem nb_crc_start
    .purgem nb_crc_end
