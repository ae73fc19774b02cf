#pragma once
// Written by muon.py with PyTorch 2.15.0.
#include <array>
#include <chorus/optim/muon.hpp>
#include <cstdint>
#include <vector>

namespace golden_muon {

/// Numbers 0, stride, 2 stride, ... of the result for matrix(rows, columns, 1), as bits of bf16.
struct Orthogonal {
  int rows, columns, stride;
  std::vector<std::uint16_t> bits;
};
inline const std::vector<Orthogonal> orthogonal = {
    {8, 8, 1,
     {0xbe92, 0x3b09, 0x3f27, 0x3ec9, 0x3e7b, 0x3e5e, 0xbe4b, 0xbe9c, 0x3d4a, 0x3e4c, 0xbf0b, 0x3f2b, 0xbebe, 0xbe59,
      0xbf04, 0xbe54, 0xbe97, 0x3e91, 0x3d75, 0xbf04, 0xbe8c, 0x3ee7, 0xbf01, 0xbe80, 0x3cfd, 0xbe33, 0xbf0a,
      0xbeaf, 0x3f0a, 0xbdb8, 0xbe98, 0xbe35, 0x3f03, 0xbe5a, 0x3eb4, 0xbe15, 0xbe18, 0xbd9a, 0xbf0a, 0x3f18,
      0xbe57, 0xbf58, 0x3e63, 0xbe2b, 0xbe90, 0xbea6, 0xbdc3, 0xbeac, 0xbf09, 0x3eb7, 0x3e02, 0xbe16, 0x3e08,
      0xbf31, 0xbe56, 0x3e95, 0x3ee4, 0x3eb9, 0x3e8e, 0xbe87, 0xbe17, 0xbef6, 0x3e13, 0xbf10}},
    {64, 32, 67,
     {0xbded, 0xbe25, 0x3dd7, 0xbe54, 0xbdd0, 0x39e6, 0xbe1d, 0xbc11, 0xbba0, 0xbd75, 0xbc97, 0x3d3a, 0xbe48, 0xbcc8,
      0xbdb9, 0xbe2f, 0x3df7, 0xbdaa, 0xbd5d, 0x3dd0, 0xbd2b, 0xbe1f, 0x3e0f, 0x3de6, 0xbe17, 0xbd2e, 0x3dfb,
      0xbd0c, 0xbe23, 0xbe07, 0xbdb1}},
    {32, 64, 67,
     {0xbde4, 0xbdc8, 0x3db8, 0xbe23, 0xbe2f, 0x385d, 0xbe24, 0x3bf2, 0xbdd2, 0xbd40, 0xbbfd, 0x3dd6, 0xbdfd, 0x3da4,
      0xbe04, 0xbe04, 0x3e1e, 0xbdb4, 0x3c4a, 0x3df7, 0x3c80, 0xbd94, 0x3e69, 0x3e36, 0xbe17, 0xbda6, 0x3d4e,
      0xbd2b, 0xbddb, 0xbd86, 0xbdc2}},
    {128, 128, 601,
     {0xbd77, 0x3d71, 0xbd09, 0x3dc9, 0xbda3, 0x3dca, 0xbdd1, 0xbe27, 0x3d25, 0x3d2e, 0x3d81, 0xbe1e, 0xbdc4, 0x3d7b,
      0xbe19, 0x3de0, 0xbd06, 0x3ce6, 0x3c42, 0x3d31, 0x3d04, 0xbd66, 0x3c74, 0xbd9b, 0x3dca, 0xbe1c, 0x3db5,
      0xbd5a}},
};

/// matrix(6, 4, 1) after steps with the gradients matrix(6, 4, 2), matrix(6, 4, 3) and matrix(6, 4, 4).
struct Steps {
  chorus::optim::MuonOptions options;
  std::array<float, 24> after;
};
inline const std::vector<Steps> steps = {
    {{.lr = 0.02},
     {-0.299488634f, 0.130922854f, 0.467037916f, 0.554219365f, 0.485947788f, 0.187307581f, -0.221598431f,
      -0.864732981f, 0.280128837f, -0.706699014f, 0.101689517f, 0.732959569f, -0.817651689f, -0.584482789f,
      -0.521262884f, -0.651718497f, -0.934593499f, 0.580224156f, -0.126050726f, -0.952545583f, -0.0388582535f,
      0.731179416f, -0.682249427f, -0.286035538f}},
    {{.lr = 0.1, .weight_decay = 0.3, .momentum = 0.3, .nesterov = false,
      .adjust_lr = chorus::optim::AdjustLr::match_rms_adamw},
     {-0.245511979f, 0.105126232f, 0.43208164f, 0.508623958f, 0.456515163f, 0.165704682f, -0.200609431f,
      -0.780856729f, 0.255918264f, -0.663530469f, 0.101877153f, 0.663471341f, -0.736234844f, -0.534071803f,
      -0.488913f, -0.596589327f, -0.844581842f, 0.542053699f, -0.102657937f, -0.852607667f, -0.0290449038f,
      0.653740704f, -0.613100052f, -0.266206682f}},
    {{.lr = 0.1, .ns_coefficients = {2, -1.5, 0.5}, .eps = 5, .ns_steps = 3,
      .adjust_lr = chorus::optim::AdjustLr::spectral_unclamped},
     {-0.299529403f, 0.126647979f, 0.45834291f, 0.554155529f, 0.485038072f, 0.179845229f, -0.219763905f, -0.83922559f,
      0.264312148f, -0.685635269f, 0.0875760689f, 0.711682677f, -0.804358721f, -0.581464767f, -0.523887932f,
      -0.631361961f, -0.90393579f, 0.562393308f, -0.111445613f, -0.934016645f, -0.0341895558f, 0.71669811f,
      -0.6722579f, -0.267689437f}},
};

}  // namespace golden_muon
