// From source text to machine code without a GPU: where NVRTC is found, what it says, the cache on disk.
//
// NVRTC itself is needed and never skipped: $ONEPASS_NVRTC, a toolkit, or the package nvidia-cuda-nvrtc.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <set>
#include <thread>

#include "cuda/runtime/cache.h"
#include "cuda/runtime/compile.h"
#include "cuda/runtime/device_code.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/gpu.h"
#include "cuda/runtime/library.h"
#include "cuda/runtime/sha256.h"
#include "onepass/cuda.h"
#include "onepass/error.h"
#include "onepass/plan.h"
#include "stub_driver/stub_cuda.h"
#include "support/child_process.h"

namespace onepass::cuda {
namespace {

namespace files = std::filesystem;
using test::ChildResult;
using test::read_bytes;
using test::run_child;
using test::run_children;
using test::ScopedVariable;
using test::TemporaryFolder;
using test::write_bytes;

constexpr const char* stub_path = ONEPASS_STUB_PATH;

Source scaling_kernel(const std::string& factor) {
  return {"scale", "extern \"C\" __global__ void scale(float* x) { x[threadIdx.x] *= " + factor + "; }"};
}

// The sentence of the Error that body() throws.
template <class Body>
std::string sentence_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void expect_has(const std::string& text, const std::string& words) {
  EXPECT_NE(text.find(words), std::string::npos) << words << "\nis not in\n" << text;
}

int count_of(const std::string& text, const std::string& words) {
  int count = 0;
  for (size_t at = text.find(words); at != text.npos; at = text.find(words, at + 1)) ++count;
  return count;
}

// A test with an empty cache of its own.
class CacheTest : public ::testing::Test {
 protected:
  CacheTest() : variable_("ONEPASS_CACHE_DIR", folder()) {}

  std::string folder() const { return parent_.path() + "/made/when/needed"; }
  std::vector<std::string> names() const {
    std::vector<std::string> list;
    if (!files::exists(folder())) return list;
    for (const auto& item : files::directory_iterator(folder())) list.push_back(item.path().filename());
    return list;
  }
  std::string only_file() const {
    EXPECT_EQ(names().size(), 1u);
    return folder() + '/' + names().front();
  }

  const CacheKey key_{"tail", "sm_90a", Sha256().add("key").hex()};
  const Cubin cubin_{std::string("\x7f"
                                 "ELF\0\n image",
                                 12),
                     40, 8, 1024};

 private:
  TemporaryFolder parent_;
  ScopedVariable variable_;
};

// ---- Where libraries are found

class LibrarySearch : public ::testing::Test {
 protected:
  // A library of its own: a copy is another library to the loader unless the name inside it is asked for.
  std::string copy(const std::string& name) const {
    const std::string path = folder_.path() + '/' + name;
    files::copy_file(stub_path, path, files::copy_options::overwrite_existing);
    return path;
  }
  Search search(std::vector<std::string> names, std::vector<std::string> paths) const {
    return {"the thing",      "ONEPASS_TEST_LIBRARY", std::move(names),
            std::move(paths), {"/first", "/second"},  "do it"};
  }

  TemporaryFolder folder_;
};

TEST_F(LibrarySearch, FirstFileThatOpensIsTaken) {
  const std::string text = folder_.path() + "/text.so";
  write_bytes(text, "no library");
  const std::string first = copy("first.so");
  const std::string second = copy("second.so");
  const std::vector<std::string> paths{folder_.path() + "/missing.so", text, first, second};
  EXPECT_EQ(open_library(search({"libonepass_nowhere.so"}, paths)).path(), first);
}

TEST_F(LibrarySearch, NamesOfTheLoaderComeBeforeFiles) {
  const std::string path = open_library(search({"libdl.so.2"}, {copy("first.so")})).path();
  expect_has(path, "libdl.so.2");
}

TEST_F(LibrarySearch, LibraryAlreadyInTheProcessIsTaken) {
  const std::string loaded = copy("loaded.so");
  ASSERT_NE(dlopen(loaded.c_str(), RTLD_NOW | RTLD_LOCAL), nullptr) << dlerror();
  const std::vector<std::string> list = loaded_libraries();
  EXPECT_NE(std::find(list.begin(), list.end(), loaded), list.end());
  // By the name inside it, which no folder of the loader has, and before a name that the loader could find.
  const std::string path = open_library(search({"libutil.so.1", "libonepass_stub.so"}, {})).path();
  EXPECT_EQ(path.find("libutil"), std::string::npos) << path;
}

TEST_F(LibrarySearch, VariableReplacesTheSearch) {
  const std::string named = copy("named.so");
  const ScopedVariable variable("ONEPASS_TEST_LIBRARY", named);
  EXPECT_EQ(open_library(search({"libdl.so.2"}, {copy("first.so")})).path(), named);
}

TEST_F(LibrarySearch, VariableThatNamesNoLibraryIsAnError) {
  const ScopedVariable variable("ONEPASS_TEST_LIBRARY", "/nowhere/lib.so");
  const std::string sentence = sentence_of([&] { open_library(search({"libdl.so.2"}, {})); });
  expect_has(sentence, "the thing cannot be opened where ONEPASS_TEST_LIBRARY says");
  expect_has(sentence, "/nowhere/lib.so");
}

TEST_F(LibrarySearch, ErrorSaysWhatWasLookedForAndWhatToDo) {
  const std::string sentence = sentence_of([&] { open_library(search({"liba_x.so", "libb_x.so"}, {})); });
  EXPECT_EQ(sentence,
            "the thing was not found: looked for liba_x.so, libb_x.so in the loader's path and in /first, "
            "/second; do it");
}

TEST_F(LibrarySearch, MissingFunctionIsAnErrorWithItsName) {
  const Library library = open_library(search({}, {copy("first.so")}));
  int (*function)() = nullptr;
  expect_has(sentence_of([&] { library.find("cuFromTheFuture", function); }),
             "has no function cuFromTheFuture");
}

TEST(NvrtcFolders, ToolkitThenTheWheelsOfLoadedLibraries) {
  const ScopedVariable home("CUDA_HOME", "/opt/cuda");
  const ScopedVariable path("CUDA_PATH", "/usr/local/cuda");
  const std::vector<std::string> folders = nvrtc_folders(
      {"/usr/lib/libc.so.6", "/venv/lib/python3.12/site-packages/torch/lib/libtorch_cuda.so",
       "/venv/lib/python3.12/site-packages/numpy/core/umath.so", "/opt/torch/lib/libtorch_cpu.so"});
  const std::string packages = "/venv/lib/python3.12/site-packages";
  const std::vector<std::string> expected{"/opt/cuda/lib64",
                                          "/usr/local/cuda/lib64",
                                          "/usr/local/cuda/targets/*/lib",
                                          packages + "/nvidia/cu13/lib",
                                          packages + "/nvidia/cuda_nvrtc/lib",
                                          packages + "/torch/lib",
                                          "/opt/nvidia/cu13/lib",
                                          "/opt/nvidia/cuda_nvrtc/lib",
                                          "/opt/torch/lib"};
  EXPECT_EQ(folders, expected);
}

// ---- Compiling

TEST(Compile, NvrtcIsFoundOnThisMachine) {
  EXPECT_TRUE(files::exists(nvrtc().path)) << nvrtc().path;
  EXPECT_NE(nvrtc().version, "0.0");
}

TEST(Compile, EmbeddedFilesAreThoseOfTheSourceTree) {
  std::set<std::string> embedded;
  for (const DeviceFile& file : device_files()) {
    const std::string name(file.name);
    const std::string folder = name.ends_with(".def") ? "include/onepass/" : "src/cuda/";
    EXPECT_TRUE(file.text == read_bytes(folder + name)) << name << " changed after the build";
    EXPECT_EQ(file.text.data()[file.text.size()], '\0');
    embedded.insert(name);
  }
  std::set<std::string> present{"pointwise.def"};
  for (const auto& item : files::recursive_directory_iterator("src/cuda")) {
    if (item.path().extension() == ".cuh") present.insert(item.path().lexically_relative("src/cuda"));
  }
  EXPECT_EQ(embedded, present);
  EXPECT_EQ(cuda::device_code_hash().size(), 64u);
}

TEST_F(CacheTest, EveryArchitectureCompilesWithFigures) {
  for (const std::string& architecture : known_architectures()) {
    const Cubin cubin = compile(scaling_kernel("3"), architecture);
    EXPECT_EQ(cubin.image.substr(0, 4),
              "\x7f"
              "ELF")
        << architecture;
    EXPECT_GT(cubin.registers, 3) << architecture;
    EXPECT_LT(cubin.registers, 40) << architecture;
    EXPECT_EQ(cubin.spilled_bytes, 0) << architecture;
    EXPECT_EQ(cubin.shared_bytes, 0) << architecture;
  }
}

TEST_F(CacheTest, SpillsAndSharedMemoryAreReported) {
  const Source source{"spill", R"(
    extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* x) {
      __shared__ float all[1000];
      float a[64];
      for (int i = 0; i < 64; ++i) a[i] = x[i * 1024 + threadIdx.x];
      all[threadIdx.x % 1000] = a[0];
      __syncthreads();
      for (int j = 0; j < 64; ++j) {
        float sum = all[j];
        for (int i = 0; i < 64; ++i) sum += a[i] * a[i * j % 64];
        x[j * 1024 + threadIdx.x] = sum;
      }
    })"};
  const Cubin cubin = compile(source, "sm_90a");
  EXPECT_EQ(cubin.registers, 32);
  EXPECT_GT(cubin.spilled_bytes, 100);
  EXPECT_EQ(cubin.shared_bytes, 4000);
}

TEST_F(CacheTest, EmbeddedHeadersAreIncludedByName) {
  const Source source{
      "one", "#include \"device/types.cuh\"\nextern \"C\" __global__ void one(float* x) { *x = 1; }"};
  EXPECT_GT(compile(source, "sm_80").image.size(), 0u);
}

TEST_F(CacheTest, ErrorsCarryTheNameAndTheLog) {
  const Source source{"broken", "extern \"C\" __global__ void broken(float* x) { *x = undeclared; }"};
  const std::string sentence = sentence_of([&] { compile(source, "sm_80"); });
  expect_has(sentence, "kernel broken does not compile");
  expect_has(sentence, "broken.cu(1): error");
  expect_has(sentence, "undeclared");
  EXPECT_TRUE(names().empty());
  EXPECT_EQ(sentence, sentence_of([&] { compile(source, "sm_80"); })) << "a failure is not forgotten";
}

TEST_F(CacheTest, UnknownArchitectureOfTheCompilerIsAnErrorWithItsLog) {
  expect_has(sentence_of([&] { compile(scaling_kernel("3"), "sm_1"); }), "gpu-architecture");
}

TEST_F(CacheTest, IgnoredSetmaxnregIsAnError) {
  const Source source{"registers", R"(
    extern "C" __global__ void registers(float* x) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
      x[threadIdx.x] *= 2;
    })"};
  const std::string sentence = sentence_of([&] { compile(source, "sm_90a"); });
  expect_has(sentence, "kernel registers is not compiled as it was written");
  expect_has(sentence, "setmaxnreg");
}

TEST_F(CacheTest, SeveralKernelsComeInTheOrderGiven) {
  std::vector<Source> sources;
  for (int i = 0; i < 6; ++i) sources.push_back(scaling_kernel(std::to_string(i) + ".5f"));
  const std::vector<Cubin> cubins = compile(sources, "sm_80");
  ASSERT_EQ(cubins.size(), sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    EXPECT_EQ(cubins[i].image, compile(sources[i], "sm_80").image) << i;
  }
  EXPECT_NE(cubins[1].image, cubins[2].image);
  sources[3].text += "#error no";
  expect_has(sentence_of([&] { compile(sources, "sm_80"); }), "kernel scale does not compile");
}

// ---- The cache on disk

TEST_F(CacheTest, FileIsReadAsItWasWritten) {
  EXPECT_FALSE(read_cached(key_).has_value());
  write_cached(key_, cubin_);
  const std::optional<Cubin> read = read_cached(key_);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->image, cubin_.image);
  EXPECT_EQ(read->registers, 40);
  EXPECT_EQ(read->spilled_bytes, 8);
  EXPECT_EQ(read->shared_bytes, 1024);
}

TEST_F(CacheTest, FolderAndFileAreOfThisUserAlone) {
  write_cached(key_, cubin_);
  EXPECT_EQ(files::status(folder()).permissions(), files::perms::owner_all);
  EXPECT_EQ(files::status(files::path(folder()).parent_path()).permissions(), files::perms::owner_all);
  EXPECT_EQ(files::status(only_file()).permissions(), files::perms::owner_read | files::perms::owner_write);
}

TEST_F(CacheTest, DamagedFilesAreNotUsed) {
  write_cached(key_, cubin_);
  const std::string whole = read_bytes(only_file());
  std::vector<std::string> damaged{"", whole.substr(0, 20), whole.substr(0, whole.size() - 1), whole + "x",
                                   std::string(4096, '\0')};
  for (const size_t at : {size_t{3}, size_t{30}, whole.find("sm_90a"), whole.size() - 1}) {
    damaged.push_back(whole);
    damaged.back()[at] ^= 1;
  }
  for (const std::string& bytes : damaged) {
    write_bytes(only_file(), bytes);
    EXPECT_FALSE(read_cached(key_).has_value()) << bytes.size();
  }
  write_bytes(only_file(), whole);
  EXPECT_TRUE(read_cached(key_).has_value());
}

TEST_F(CacheTest, FileOfAnotherKernelUnderThisNameIsNotUsed) {
  write_cached(key_, cubin_);
  CacheKey other = key_;
  other.hash = Sha256().add("other").hex();
  const std::string mine = only_file();
  write_cached(other, cubin_);
  const std::string bytes = read_bytes(mine);
  for (const std::string& name : names()) write_bytes(folder() + '/' + name, bytes);
  EXPECT_TRUE(read_cached(key_).has_value());
  EXPECT_FALSE(read_cached(other).has_value());
}

TEST_F(CacheTest, FolderThatOthersCanWriteToIsNotUsed) {
  write_cached(key_, cubin_);
  for (const auto extra : {files::perms::group_write, files::perms::others_write}) {
    files::permissions(folder(), files::perms::owner_all | extra);
    EXPECT_FALSE(read_cached(key_).has_value());
    CacheKey other = key_;
    other.hash = Sha256().add("other").hex();
    write_cached(other, cubin_);
    EXPECT_EQ(names().size(), 1u);
  }
}

TEST_F(CacheTest, FileThatOthersCanWriteToIsNotUsed) {
  write_cached(key_, cubin_);
  files::permissions(only_file(), files::perms::others_write, files::perm_options::add);
  EXPECT_FALSE(read_cached(key_).has_value());
}

TEST_F(CacheTest, LinkInPlaceOfTheFileIsNotFollowed) {
  write_cached(key_, cubin_);
  const std::string file = only_file();
  files::rename(file, folder() + "/elsewhere");
  files::create_symlink(folder() + "/elsewhere", file);
  EXPECT_FALSE(read_cached(key_).has_value());
}

TEST_F(CacheTest, FolderOfAnotherUserIsNotUsed) {
  std::string foreign = "/usr";  // of root
  if (geteuid() == 0) {
    write_cached(key_, cubin_);
    ASSERT_EQ(chown(folder().c_str(), 1, 1), 0);
    foreign = folder();
  }
  const ScopedVariable variable("ONEPASS_CACHE_DIR", foreign);
  EXPECT_FALSE(read_cached(key_).has_value());
  expect_has(sentence_of([] { cache_entries(); }), "belongs to another user");
}

TEST_F(CacheTest, EntriesAreListedAndCleared) {
  EXPECT_TRUE(cache_entries().empty());
  EXPECT_EQ(clear_cache(), 0);
  write_cached(key_, cubin_);
  write_bytes(folder() + "/broken-sm_80-00.cubin", "damaged");
  write_bytes(folder() + "/.writing-1-2", "left by a killed process");
  write_bytes(folder() + "/.compiling-tail-sm_80-00.cubin-1", "");
  write_bytes(folder() + "/.condemned-tail-sm_80-00.cubin.txt", "a record");
  write_bytes(folder() + "/notes.txt", "of the user");
  const std::vector<CacheEntry> entries = cache_entries();
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[0].kernel, "damaged");
  EXPECT_EQ(entries[1].kernel, "tail");
  EXPECT_EQ(entries[1].architecture, "sm_90a");
  EXPECT_EQ(entries[1].bytes, static_cast<int64_t>(files::file_size(entries[1].file)));
  EXPECT_EQ(clear_cache(), 2);
  EXPECT_EQ(names(), std::vector<std::string>{"notes.txt"});
}

TEST(CacheDirectory, VariablesThenHome) {
  const ScopedVariable home("HOME", "/home/someone");
  const ScopedVariable own("ONEPASS_CACHE_DIR", "");
  const ScopedVariable xdg("XDG_CACHE_HOME", "");
  EXPECT_EQ(cache_directory(), "/home/someone/.cache/onepass");
  const ScopedVariable relative("XDG_CACHE_HOME", "not/absolute");
  EXPECT_EQ(cache_directory(), "/home/someone/.cache/onepass");
  const ScopedVariable absolute("XDG_CACHE_HOME", "/caches");
  EXPECT_EQ(cache_directory(), "/caches/onepass");
  const ScopedVariable given("ONEPASS_CACHE_DIR", "/given");
  EXPECT_EQ(cache_directory(), "/given");
}

TEST(Sha256, FipsExamples) {
  EXPECT_EQ(Sha256().add("").hex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256().add("abc").hex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256().add("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq").hex(),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  const std::string million(1000000, 'a');
  EXPECT_EQ(Sha256().add(million.substr(0, 77)).add(million.substr(77)).hex(),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  EXPECT_NE(Sha256().add_field("ab").add_field("c").hex(), Sha256().add_field("a").add_field("bc").hex());
}

// ---- Processes of their own. The stub compiler counts what it is asked.

stub::State& stub_state() {
  void* library = dlopen(stub_path, RTLD_NOW | RTLD_LOCAL);
  return *reinterpret_cast<stub::State* (*)()>(dlsym(library, "onepass_stub_state"))();
}

TEST(DISABLED_Child, CompilesTwoKernels) {
  EXPECT_EQ(compile(Source{"a", "text of a"}, "sm_90a").image, "text of a");
  EXPECT_EQ(compile(Source{"a", "text of a"}, "sm_90a").image, "text of a");
  EXPECT_EQ(compile(Source{"b", "text of b"}, "sm_90a").image, "text of b");
  std::printf("%d compilations\n", stub_state().compilations.load());
}

TEST_F(CacheTest, SecondProcessCompilesNothing) {
  expect_has(run_child("CompilesTwoKernels", {{"ONEPASS_NVRTC", stub_path}}).output, "\n2 compilations");
  const ChildResult second = run_child("CompilesTwoKernels", {{"ONEPASS_NVRTC", stub_path}});
  expect_has(second.output, "\n0 compilations");
  EXPECT_EQ(second.exit_code, 0);
  EXPECT_EQ(count_of(second.output, "warning"), 0);
}

TEST_F(CacheTest, DamagedFilesAreCompiledAgainWithOneWarning) {
  run_child("CompilesTwoKernels", {{"ONEPASS_NVRTC", stub_path}});
  for (const std::string& name : names()) write_bytes(folder() + '/' + name, "damaged");
  const ChildResult second = run_child("CompilesTwoKernels", {{"ONEPASS_NVRTC", stub_path}});
  EXPECT_EQ(second.exit_code, 0);
  expect_has(second.output, "\n2 compilations");
  EXPECT_EQ(count_of(second.output, "onepass: warning: "), 1) << second.output;
  expect_has(second.output, "is damaged");
  expect_has(run_child("CompilesTwoKernels", {{"ONEPASS_NVRTC", stub_path}}).output, "\n0 compilations");
}

TEST_F(CacheTest, FolderThatCannotBeMadeMeansOneWarning) {
  for (const std::string folder : {"/proc/onepass", "/dev/null/onepass"}) {
    const ChildResult result =
        run_child("CompilesTwoKernels", {{"ONEPASS_NVRTC", stub_path}, {"ONEPASS_CACHE_DIR", folder}});
    EXPECT_EQ(result.exit_code, 0);
    expect_has(result.output, "\n2 compilations");
    EXPECT_EQ(count_of(result.output, "onepass: warning: "), 1) << result.output;
    expect_has(result.output, folder);
  }
}

TEST_F(CacheTest, FolderOfOthersMeansOneWarning) {
  run_child("CompilesTwoKernels", {{"ONEPASS_NVRTC", stub_path}});
  files::permissions(folder(), files::perms::all);
  const ChildResult second = run_child("CompilesTwoKernels", {{"ONEPASS_NVRTC", stub_path}});
  EXPECT_EQ(second.exit_code, 0);
  expect_has(second.output, "\n2 compilations");
  EXPECT_EQ(count_of(second.output, "onepass: warning: "), 1) << second.output;
  expect_has(second.output, "can be written by other users");
}

TEST(DISABLED_Child, ThreadsShareCompilations) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([] {
      for (const char* name : {"a", "b"}) EXPECT_EQ(compile(Source{name, name}, "sm_80").image, name);
      EXPECT_THROW(compile(Source{"bad", "#error //log the words"}, "sm_80"), Error);
    });
  }
  for (std::thread& thread : threads) thread.join();
  // Each failed attempt served all who waited for it; a thread that came later tried again.
  EXPECT_GE(stub_state().compilations, 3);
  EXPECT_LE(stub_state().compilations, 2 + 8);
  const int before = stub_state().compilations;
  std::vector<Source> sources;
  for (const char* name : {"c", "d", "e", "f"}) sources.push_back({name, name});
  const std::vector<Cubin> cubins = compile(sources, "sm_80");
  EXPECT_EQ(cubins[2].image, "e");
  EXPECT_EQ(stub_state().compilations, before + 4);
  const int expected = std::thread::hardware_concurrency() > 1 ? 2 : 1;
  EXPECT_GE(stub_state().concurrent_compilations, expected);
}

TEST_F(CacheTest, ThreadsCompileAKernelOnceAndDifferentOnesInParallel) {
  const ChildResult result = run_child("ThreadsShareCompilations", {{"ONEPASS_NVRTC", stub_path}});
  EXPECT_EQ(result.exit_code, 0) << result.output;
}

TEST(DISABLED_Child, CompilesSixKernels) {
  std::vector<Source> sources;
  for (int i = 0; i < 6; ++i) sources.push_back(scaling_kernel(std::to_string(i) + ".25f"));
  for (const Cubin& cubin : compile(sources, "sm_90a")) EXPECT_GT(cubin.image.size(), 1000u);
}

TEST_F(CacheTest, ProcessesAtOnceLeaveWholeFiles) {
  for (const ChildResult& result : run_children(4, "CompilesSixKernels", {})) {
    EXPECT_EQ(result.exit_code, 0) << result.output;
    EXPECT_EQ(count_of(result.output, "warning"), 0) << result.output;
  }
  EXPECT_EQ(names().size(), 6u);
  for (const CacheEntry& entry : cache_entries()) EXPECT_EQ(entry.kernel, "scale");
}

TEST(DISABLED_Child, ReportsWhatTheAssemblerGaveUp) {
  const Source source{"gemm",
                      "//log ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions "
                      "are serialized due to insufficient register resources"};
  expect_has(sentence_of([&] { compile(source, "sm_90a"); }),
             "kernel gemm is not compiled as it was written: ptxas info : (C7510)");
}

TEST_F(CacheTest, SerialisedWgmmaIsAnError) {
  const ChildResult result = run_child("ReportsWhatTheAssemblerGaveUp", {{"ONEPASS_NVRTC", stub_path}});
  EXPECT_EQ(result.exit_code, 0) << result.output;
}

TEST(DISABLED_Child, PlansWithoutARowThatDoesNotCompile) {
  const Problem problem = Problem::parse("swish | group_norm(2) @ 2x8x9x7", Device::cuda());
  const std::string first = plan(problem).strategy();
  stub_state().refused = "onepass_" + first + "(";
  const Problem other = Problem::parse("swish | group_norm(2) @ 2x8x9x8", Device::cuda());
  const Plan second = plan(other);
  EXPECT_NE(second.strategy(), first);
  expect_has(second.explain(), "no: kernel onepass_" + first + " does not compile: STUB_ERROR");
  expect_has(sentence_of([&] { plan(other, {first, ""}); }), "does not compile");
  stub_state().refused = "__global__";
  expect_has(sentence_of([&] { plan(Problem::parse("swish @ 2x8x9x9", Device::cuda())); }),
             "does not compile");
}

TEST_F(CacheTest, PlansGoOnWithTheNextRow) {
  const ChildResult result = run_child("PlansWithoutARowThatDoesNotCompile",
                                       {{"ONEPASS_NVRTC", stub_path}, {"ONEPASS_CUDA_DRIVER", stub_path}});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  expect_has(result.output, "onepass: warning: strategy ");
}

// A GPU that has no room for a row's kernel, as where another process has a part of it: blocks that wait for
// each other (gemm_pingpong, gemm_wgmma), clusters (tail_staged, thin_resident), both at once.
TEST(DISABLED_Child, PlansWithoutARowThatHasNoRoom) {
  const std::pair<std::string, std::string> problems[]{
      {"gemm_pingpong", "conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 8x64x256x256 tf32"},
      {"gemm_wgmma", "conv_transpose2d(64,64,k=3) | gelu | group_norm(8) @ 8x64x256x256"},
      {"thin_resident", "conv2d(4,16,k=3,p=1) | swish | group_norm(4) @ 4x4x64x64 tf32"},
      {"tail_staged", "swish | group_norm(4) @ 64x16x128x128"},
  };
  for (const auto& [row, text] : problems) {
    SCOPED_TRACE(row);
    const Problem problem = Problem::parse(text, Device::cuda());
    stub_state().room = SIZE_MAX;
    EXPECT_EQ(plan(problem).strategy(), row);
    stub_state().room = 64 << 10;
    const Plan second = plan(problem);
    EXPECT_NE(second.strategy(), row);
    expect_has(second.explain(), "no: kernel onepass_" + row + " has no room: the GPU runs 0 of its ");
    expect_has(sentence_of([&] { plan(problem, {row, ""}); }), "must be at least 1");
  }
}

TEST_F(CacheTest, PlansGoOnWhereARowHasNoRoom) {
  const ChildResult result = run_child("PlansWithoutARowThatHasNoRoom",
                                       {{"ONEPASS_NVRTC", stub_path}, {"ONEPASS_CUDA_DRIVER", stub_path}});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  expect_has(result.output, "onepass: warning: strategy gemm_pingpong is left out");
}

TEST(DISABLED_Child, PlansATailInsideARowWithoutOneThatDoesNotCompile) {
  const auto direct = [](const char* sizes) {
    const std::string block = "conv1d(2,8,k=1) | swish | group_norm(2) @ ";
    return plan(Problem::parse(block + sizes, Device::cuda()), {"direct", ""}).explain();
  };
  const auto tail_of = [](const std::string& text) {
    const size_t begin = text.find("then: ") + 6;
    return text.substr(begin, text.find(' ', begin) - begin);
  };
  const std::string first = tail_of(direct("2x2x63"));
  stub_state().refused = "onepass_" + first + "(";
  const std::string second = tail_of(direct("2x2x64"));
  EXPECT_NE(second, first);
  EXPECT_EQ(second.rfind("tail_", 0), 0u) << second;
}

TEST_F(CacheTest, RowsGoOnWithTheNextTail) {
  const ChildResult result = run_child("PlansATailInsideARowWithoutOneThatDoesNotCompile",
                                       {{"ONEPASS_NVRTC", stub_path}, {"ONEPASS_CUDA_DRIVER", stub_path}});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  expect_has(result.output, "onepass: warning: strategy tail_");
}

TEST(DISABLED_Child, PrintsWhyThereIsNoNvrtc) {
  std::printf("%s\n", sentence_of([] { compile(scaling_kernel("2"), "sm_80"); }).c_str());
}

TEST_F(CacheTest, MissingNvrtcIsOneSentence) {
  expect_has(run_child("PrintsWhyThereIsNoNvrtc", {{"ONEPASS_NVRTC", "/nowhere/libnvrtc.so"}}).output,
             "\nNVRTC cannot be opened where ONEPASS_NVRTC says: /nowhere/libnvrtc.so");
  expect_has(run_child("PrintsWhyThereIsNoNvrtc", {{"ONEPASS_NVRTC", "libdl.so.2"}}).output,
             "is too old: it has no function nvrtcVersion");
}

}  // namespace
}  // namespace onepass::cuda
