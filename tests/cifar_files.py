"""Files in the binary format of CIFAR-10 with generated images, each with a pattern that depends on its label."""


def write(folder, images):
    """Writes the five training files and the test file, with `images` images each, into `folder`."""
    for number, name in enumerate([f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]):
        records = bytearray()
        for image in range(images):
            label = (image + number) % 10
            records.append(label)
            records += bytes((label * 25 + (7 * image + 13 * number + position) * (position % (label + 2))) % 256
                             for position in range(3072))
        (folder / name).write_bytes(records)
