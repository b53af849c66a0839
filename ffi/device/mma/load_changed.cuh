// The plain view of an operand that a prologue changes, between where a thread copies it to and where all read it: each
// element once, by the thread that copied it. Change is generated (cutjax/kernels/mma/prologue.py).

struct Changed : Plain {
  static constexpr bool CHANGES = true;
  using Change = ::Change;

  // What the prologue is told, behind what Plain is.
  template <int COUNT>
  struct Source : Plain::Source<COUNT> {
    Told told;
  };

  template <int COUNT, int PLACES, bool K_MAJOR, int SIZE>
  struct Lines : Plain::Lines<COUNT, PLACES, K_MAJOR, SIZE> {
    using Base = Plain::Lines<COUNT, PLACES, K_MAJOR, SIZE>;
    Change how;
    int line, element;  // of this thread's first place in the block that is changed next

    template <int PRODUCTS, typename LineOf, typename ByteOf>
    DEVICE void begin(const Source<PRODUCTS>& source, const char* matrix, int first, int lines, int byte,
                      LineOf line_of, ByteOf byte_of) {
      Base::begin(source, matrix, first, lines, byte, line_of, byte_of);
      how.begin(source);
      line = first, element = byte / SIZE;
    }

    // 16 bytes that are so many lines, and bytes of a line, from the first place.
    DEVICE void change(u32 (&x)[4], int lines, int bytes, int valid) const {
      how(x, line + lines, element + bytes / SIZE, valid);
    }
    DEVICE void changed() { (K_MAJOR ? element : line) += BK; }
  };
};
