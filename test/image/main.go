// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/cohdi/cohdi-agent/test/image/images"
	"github.com/cohdi/cohdi-agent/test/image/oci"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("image", flag.ContinueOnError)
	archive := flags.String("archive", "", "write the image as an OCI archive to this file")
	version := flags.String("version", "dev", "what the agent calls its version")
	root := flags.String("root", "", "lay the image's files out below this folder, which is replaced")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *archive == "" && *root == "" || flags.NArg() > 0 {
		return errors.New("give -archive FILE, -root DIR or both")
	}
	temp, err := os.MkdirTemp("", "cohdi-agent-image-")
	if err != nil {
		return fmt.Errorf("create folder for build: %w", err)
	}
	defer os.RemoveAll(temp)
	programs, err := images.Build(ctx, temp, *version)
	if err != nil {
		return err
	}
	img, err := images.Agent(programs)
	if err != nil {
		return err
	}
	if *root != "" {
		if err := os.RemoveAll(*root); err != nil {
			return fmt.Errorf("replace %s: %w", *root, err)
		}
		if err := oci.WriteDir(img, *root); err != nil {
			return err
		}
	}
	if *archive == "" {
		return nil
	}
	if err := oci.Write(img, *archive); err != nil {
		return err
	}
	fmt.Printf("%s is in %s\n", img.Name, *archive)
	return nil
}
