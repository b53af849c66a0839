// The windows of images (cutjax/kernels/operand.py): a line is a window, and along it lie the channels of each tap. An
// address is computed of two parts, which are added up: what of it is the window's, and what the tap's. Of these one
// stays as it is through a tile, and the other goes on with each block of k.
//
// SPREAD: there are zeros between the elements of images, and places are divided to be those of elements. Kernels
// compute phases of the result instead where they can (cutjax/kernels/mma/views.py).

struct Im2col {
  static constexpr bool APART = true;
  static constexpr bool CHANGES = false;

  struct Axis {
    Two sizes;   // of an image, and of the grid
    Two window;  // its size, and the first element's place in the image, negative
    Two steps;   // strides, dilation
  };

  // Pixels are `pitch` elements from each other, groups of channels `apart`.
  template <int COUNT>
  struct Source {
    const char* bases[COUNT];
    int pitch;
    i64 apart;
    Two channels;  // of a pixel in a group, and the last digit of BK
    Axis axes[AXES];
    Two blocks[(AXES + 1) / 2];   // the other digits of BK
    Two spreads[(AXES + 1) / 2];  // along each axis; only where SPREAD

    template <int SIZE>
    DEVICE const char* matrix(int product, int number) const {
      return bases[product] + number * apart * SIZE;
    }
  };

  // A place in the images, or how far a tap is from the first one: modulo 2^32, as which sums are right where they are
  // of a pixel.
  struct Pixel {
    u32 at[AXES], number;
  };

  template <int COUNT, int PLACES, bool K_MAJOR, int SIZE>
  struct Lines {
    struct Along {
      Digits tap;
      Pixel pixel;
      const char* channel;  // of the first image's first pixel
    };

    Source<1> source;
    const char* matrix;
    Digits taps[PLACES];
    Digits windows[K_MAJOR ? 1 : COUNT];
    Pixel firsts[K_MAJOR ? COUNT : 1];  // of windows

    static DEVICE u32 of(const Two (&twos)[(AXES + 1) / 2], int i) { return i % 2 ? twos[i / 2].y : twos[i / 2].x; }
    DEVICE u32 step(int i) const { return i == AXES ? source.channels.y : of(source.blocks, i); }

    DEVICE auto of_taps() const {
      return [this](int i) -> u32 { return i == AXES ? source.channels.x : source.axes[i].window.x; };
    }
    DEVICE auto of_grid() const {
      return [this](int i) -> u32 { return source.axes[i - 1].sizes.y; };
    }

    template <typename LineOf, typename ByteOf>
    DEVICE void begin(const Source<1>& its_source, const char* its_matrix, int line, int, int byte, LineOf line_of,
                      ByteOf byte_of) {
      source = its_source, matrix = its_matrix;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        Digits& window = windows[K_MAJOR ? 0 : i];
        window.set(line + line_of(i), of_grid());
        if constexpr (K_MAJOR) firsts[i] = first_of(window);
      }
#pragma unroll
      for (int i = 0; i < PLACES; ++i) taps[i].set((byte + byte_of(i)) / SIZE, of_taps());
    }

    DEVICE void advance() {
      auto of_block = [this](int i) { return step(i); };
      if constexpr (K_MAJOR) {
#pragma unroll
        for (int i = 0; i < PLACES; ++i) taps[i].add(of_block, of_taps());
      } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) windows[i].add(of_block, of_grid());
      }
    }

    // The number of the pixel at a place, or, where places are not yet those of pixels, of the image.
    DEVICE void number(Pixel& pixel, u32 image) const {
      pixel.number = image;
      if constexpr (!SPREAD) {
#pragma unroll
        for (int i = 0; i < AXES; ++i) pixel.number = pixel.number * source.axes[i].sizes.x + pixel.at[i];
      }
    }

    DEVICE Pixel first_of(const Digits& window) const {
      Pixel found;
#pragma unroll
      for (int i = 0; i < AXES; ++i)
        found.at[i] = window.digit[i + 1] * source.axes[i].steps.x + source.axes[i].window.y;
      number(found, window.digit[0]);
      return found;
    }

    DEVICE Along along_of(const Digits& tap) const {
      Along found;
      found.tap = tap;
#pragma unroll
      for (int i = 0; i < AXES; ++i) found.pixel.at[i] = tap.digit[i] * source.axes[i].steps.y;
      number(found.pixel, 0);
      found.channel = matrix + static_cast<u64>(tap.digit[AXES]) * SIZE;
      return found;
    }

    DEVICE Along along(int i, int) const { return along_of(taps[i]); }

    DEVICE void skip(Along& along, int bytes) const {
      along.tap.skip(bytes / SIZE, of_taps());
      along = along_of(along.tap);
    }

    DEVICE Spot at(int i, int, const Along& along) const {
      Pixel window = K_MAJOR ? firsts[i] : first_of(windows[i]);
      u32 number = window.number + along.pixel.number;
      bool there = true;
#pragma unroll
      for (int axis = 0; axis < AXES; ++axis) {
        u32 place = window.at[axis] + along.pixel.at[axis], size = source.axes[axis].sizes.x;
        if constexpr (SPREAD) {
          u32 spread = of(source.spreads, axis), element = place / spread;
          there &= place < size * spread && element * spread == place;
          number = number * size + element;
        } else {
          there &= place < size;
        }
      }
      return {along.channel + static_cast<u64>(number) * static_cast<u32>(source.pitch * SIZE), there};
    }
  };
};
