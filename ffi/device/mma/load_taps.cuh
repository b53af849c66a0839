// The weights of a convolution, tap by tap in an order of their own (cutjax/kernels/operand.py). Where they lie along k
// a line is a column of the result, and channels lie along it; otherwise it is a channel of a tap.

struct Taps {
  static constexpr bool APART = true;
  static constexpr bool CHANGES = false;

  struct Axis {
    Two window;  // its size, and the digit of BK
    i64 step;    // elements from a tap to the next
  };

  // Neighbouring columns, or channels, are `pitch` elements from each other, groups of channels `apart`.
  template <int COUNT>
  struct Source {
    const char* bases[COUNT];
    int pitch;
    i64 apart;
    Two channels;  // of a group, and the last digit of BK
    Axis axes[AXES];

    template <int SIZE>
    DEVICE const char* matrix(int product, int number) const {
      return bases[product] + number * apart * SIZE;
    }
  };

  template <int COUNT, int PLACES, bool K_MAJOR, int SIZE>
  struct Lines {
    struct Along {
      Digits tap;
      i64 bytes;
    };

    const char* next;
    i64 pitch;
    Two channels;
    Axis axes[AXES];
    Digits taps[K_MAJOR ? PLACES : COUNT];

    DEVICE auto of_taps() const {
      return [this](int i) -> u32 { return i == AXES ? channels.x : axes[i].window.x; };
    }

    template <int PRODUCTS, typename LineOf, typename ByteOf>
    DEVICE void begin(const Source<PRODUCTS>& source, const char* matrix, int line, int, int byte, LineOf line_of,
                      ByteOf byte_of) {
      pitch = static_cast<i64>(source.pitch) * SIZE, channels = source.channels;
#pragma unroll
      for (int i = 0; i < AXES; ++i) axes[i] = source.axes[i];
      next = matrix + (K_MAJOR ? line * pitch : byte);
#pragma unroll
      for (int i = 0; i < (K_MAJOR ? PLACES : COUNT); ++i)
        taps[i].set(K_MAJOR ? (byte + byte_of(i)) / SIZE : line + line_of(i), of_taps());
    }

    DEVICE void advance() {
      auto of_block = [this](int i) -> u32 { return i == AXES ? channels.y : axes[i].window.y; };
#pragma unroll
      for (int i = 0; i < (K_MAJOR ? PLACES : COUNT); ++i) taps[i].add(of_block, of_taps());
    }

    // Of a tap's channel, which is so many bytes from the next.
    DEVICE i64 bytes_of(const Digits& tap, i64 channel) const {
      i64 bytes = tap.digit[AXES] * channel;
#pragma unroll
      for (int i = 0; i < AXES; ++i) bytes += tap.digit[i] * (axes[i].step * SIZE);
      return bytes;
    }

    DEVICE Along along(int i, int byte) const {
      if constexpr (!K_MAJOR) return {{}, byte};
      return {taps[i], bytes_of(taps[i], SIZE)};
    }

    DEVICE void skip(Along& along, int bytes) const {
      if constexpr (K_MAJOR) {
        along.tap.skip(bytes / SIZE, of_taps());
        along.bytes = bytes_of(along.tap, SIZE);
      } else {
        along.bytes += bytes;
      }
    }

    DEVICE Spot at(int i, int line, const Along& along) const {
      return {next + (K_MAJOR ? line * pitch : bytes_of(taps[i], pitch)) + along.bytes, true};
    }
  };
};
