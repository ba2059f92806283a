// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// What a caller can decide on.
var (
	// ErrNoLibrary: no driver is installed on this node.
	ErrNoLibrary = errors.New("no NVIDIA driver library on this node")
	// ErrDriverNotLoaded: the library is there, its kernel module is not.
	ErrDriverNotLoaded = errors.New("the NVIDIA kernel driver is not loaded")
	// ErrUnsupported: this library or this GPU cannot do it. Removal falls back to sysfs.
	ErrUnsupported = errors.New("not supported by this driver")
	// ErrNotFound: the driver knows no such GPU. It may be on the bus all the same: drained, or not yet bound.
	ErrNotFound = errors.New("the driver knows no such GPU")
	// ErrLost: the GPU has gone from under the driver.
	ErrLost = errors.New("the GPU is lost")
	// ErrInUse: a process, or persistence mode, holds the GPU.
	ErrInUse = errors.New("the GPU is in use")
	// ErrHung: the driver did not answer in time. The outcome of the call is unknown.
	ErrHung = errors.New("the driver does not answer")
)

// failure turns what an NVML function returned into an error. go-nvml's own text is not used: it asks the
// library, which may be hung or unloaded by then.
func failure(call, on string, ret nvml.Return) error {
	if ret == nvml.SUCCESS {
		return nil
	}
	if on != "" {
		call += " on " + on
	}
	switch ret {
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND:
		return fmt.Errorf("%s: %w", call, ErrUnsupported)
	case nvml.ERROR_NOT_FOUND, nvml.ERROR_GPU_NOT_FOUND:
		return fmt.Errorf("%s: %w", call, ErrNotFound)
	case nvml.ERROR_GPU_IS_LOST:
		return fmt.Errorf("%s: %w", call, ErrLost)
	case nvml.ERROR_IN_USE:
		return fmt.Errorf("%s: %w", call, ErrInUse)
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return fmt.Errorf("%s: %w", call, ErrDriverNotLoaded)
	default:
		return fmt.Errorf("%s: NVML answered %s", call, returnText(ret))
	}
}

func returnText(ret nvml.Return) string {
	switch ret {
	case nvml.ERROR_UNINITIALIZED:
		return "that it is not initialized"
	case nvml.ERROR_INVALID_ARGUMENT:
		return "invalid argument"
	case nvml.ERROR_NO_PERMISSION:
		return "no permission (the agent has to run privileged, as root)"
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return "that library and kernel driver are of different versions"
	case nvml.ERROR_OPERATING_SYSTEM:
		return "that the operating system refused"
	case nvml.ERROR_RESET_REQUIRED:
		return "that the GPU has to be reset"
	case nvml.ERROR_NOT_READY:
		return "not ready"
	case nvml.ERROR_UNKNOWN:
		return "unknown error"
	default:
		return fmt.Sprintf("error %d", int(ret))
	}
}
