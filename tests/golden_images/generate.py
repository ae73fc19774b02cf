#!/usr/bin/env python3
"""Writes images.safetensors beside this file: small PNG and JPEG files, and the pixels that torchvision and Pillow read from
them; pictures of other sizes that PyTorch makes of one; its colours changed by torchvision.

usage: generate.py   (needs torch, torchvision, Pillow, NumPy)

NAME.file are a file's bytes, NAME.pixels [height, width, 3] what it holds. resize.H.W are floats in [0, 1] by PyTorch's
interpolation with antialias, pillow.H.W bytes by Pillow's, which rounds to 8 bits after each of its two passes; both of the
picture `source`. color.NAME are what the function of that name gives for `source`.
"""

import io
import json
import pathlib
import struct
import zlib

import numpy
import torch
import torch.nn.functional as F
import torchvision.transforms.v2.functional as T
from PIL import Image
from torchvision.io import ImageReadMode, decode_image

HERE = pathlib.Path(__file__).resolve().parent
random = numpy.random.default_rng(7)
tensors = {}


def picture(height, width, channels, top=255):
    """Smooth, with some noise and an edge: neither trivial for a coder nor all noise."""
    y, x = numpy.mgrid[0:height, 0:width]
    planes = [numpy.sin(x / (3 + c)) * 70 + numpy.cos(y / (2 + c)) * 50 + 128 + 60 * (x > width * 0.6) * (c - 1) for c in range(channels)]
    out = numpy.stack(planes, 2) + random.normal(0, 6, (height, width, channels))
    return (numpy.clip(out, 0, 255) / 255 * top).astype(numpy.uint8 if top == 255 else numpy.uint16)


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(array, kind, depth=8, interlaced=False, more=b""):
    """A PNG file of what Pillow does not write. `array`: [height, width, samples], of 16 bits if depth is 16."""
    def lines(part):
        rows = part.astype(">u2").tobytes() if depth == 16 else part.astype(numpy.uint8).tobytes()
        length = len(rows) // max(part.shape[0], 1)
        return b"".join(b"\0" + rows[y * length:(y + 1) * length] for y in range(part.shape[0])) if part.size else b""
    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)] if interlaced else [(0, 0, 1, 1)]
    data = b"".join(lines(array[y::dy, x::dx]) for y, x, dy, dx in passes)
    header = struct.pack(">IIBBBBB", array.shape[1], array.shape[0], depth, kind, 0, 0, int(interlaced))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + more + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def by_pillow(array, mode, form, **options):
    out = io.BytesIO()
    Image.fromarray(array.squeeze(), mode).save(out, form, **options)
    return out.getvalue()


def add(name, content):
    pixels = decode_image(torch.frombuffer(bytearray(content), dtype=torch.uint8), ImageReadMode.RGB).permute(1, 2, 0).numpy()
    if pixels.dtype == numpy.uint16:
        pixels = (pixels >> 8).astype(numpy.uint8)
    other = numpy.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    assert (pixels == other).all(), f"{name}: torchvision and Pillow differ by {numpy.abs(pixels.astype(int) - other).max()}"
    tensors[name + ".file"] = numpy.frombuffer(content, numpy.uint8)
    tensors[name + ".pixels"] = pixels


def files():
    rgb = picture(13, 19, 3)
    add("png_rgb", by_pillow(rgb, "RGB", "PNG"))
    add("png_rgba", by_pillow(picture(9, 6, 4), "RGBA", "PNG"))
    add("png_gray", by_pillow(picture(9, 6, 1), "L", "PNG"))
    add("png_gray_alpha", by_pillow(picture(9, 6, 2), "LA", "PNG"))
    add("png_bits", by_pillow(picture(11, 13, 1) > 128, "1", "PNG"))
    palette = Image.fromarray(rgb).quantize(12)
    out = io.BytesIO()
    palette.save(out, "PNG", transparency=3)
    add("png_palette", out.getvalue())
    add("png_16", png(picture(7, 5, 3, 65535), 2, 16))
    # Of 16-bit gray the upper 8 bits remain. Pillow cuts it to 255.
    gray = picture(7, 5, 1, 65535)
    content = png(gray, 0, 16)
    tensors["png_gray_16.file"] = numpy.frombuffer(content, numpy.uint8)
    tensors["png_gray_16.pixels"] = numpy.repeat((gray >> 8).astype(numpy.uint8), 3, 2)
    add("png_interlaced", png(picture(11, 13, 3), 2, interlaced=True))
    add("png_key", png(rgb[:5, :4], 2, more=chunk(b"tRNS", struct.pack(">HHH", *rgb[2, 2]))))
    add("png_text", png(rgb[:5, :4], 2, more=chunk(b"gAMA", struct.pack(">I", 30000)) + chunk(b"tEXt", b"Title\0A picture")))
    large = picture(37, 45, 3)
    add("jpeg_420", by_pillow(large, "RGB", "JPEG", quality=75))
    add("jpeg_444", by_pillow(rgb, "RGB", "JPEG", quality=95, subsampling=0))
    add("jpeg_422", by_pillow(rgb, "RGB", "JPEG", quality=50, subsampling=1))
    add("jpeg_progressive", by_pillow(large, "RGB", "JPEG", quality=80, progressive=True))
    add("jpeg_gray", by_pillow(picture(17, 9, 1), "L", "JPEG", optimize=True))
    add("jpeg_restarts", by_pillow(large, "RGB", "JPEG", quality=60, restart_marker_rows=1))
    add("jpeg_cmyk", by_pillow(picture(17, 9, 4), "CMYK", "JPEG", quality=90))
    add("jpeg_rgb", by_pillow(rgb, "RGB", "JPEG", quality=90, keep_rgb=True))
    exif = Image.Exif()
    exif[0x0112] = 6
    add("jpeg_turned", by_pillow(rgb, "RGB", "JPEG", quality=90, exif=exif))


def sizes():
    source = picture(15, 21, 3)
    tensors["source"] = source
    floats = torch.from_numpy(source).permute(2, 0, 1).float() / 255
    for height, width in ((7, 9), (15, 21), (24, 30), (5, 40), (1, 1)):
        tensors[f"resize.{height}.{width}"] = F.interpolate(floats[None], (height, width), mode="bilinear", antialias=True)[0].numpy()
        tensors[f"pillow.{height}.{width}"] = numpy.asarray(Image.fromarray(source).resize((width, height), Image.BILINEAR))
    for name, image in (("brightness", T.adjust_brightness(floats, 1.4)), ("contrast", T.adjust_contrast(floats, 0.6)),
                        ("saturation", T.adjust_saturation(floats, 1.7)), ("hue", T.adjust_hue(floats, 0.3)),
                        ("hue_back", T.adjust_hue(floats, -0.45))):
        tensors["color." + name] = image.numpy()


def save(path):
    header, data = {"__metadata__": {"torch": torch.__version__}}, b""
    for name, tensor in tensors.items():
        raw = numpy.ascontiguousarray(tensor).tobytes()
        header[name] = {"dtype": {"uint8": "U8", "float32": "F32"}[str(tensor.dtype)], "shape": list(tensor.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


files()
sizes()
save(HERE / "images.safetensors")
