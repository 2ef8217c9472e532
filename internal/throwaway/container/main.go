// Command container starts a PostgreSQL server in a container, prints its URL
// as one line, and removes the container when stdin ends. Its arguments are
// arguments of postgres. The environment variable RATELIMIT_POSTGRES_IMAGE
// names another image than the default one.
//
// Package throwaway runs it. It is a module of its own to keep the many
// dependencies of testcontainers out of the go.mod of the library.
package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log"
	"os"

	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/modules/postgres"
)

const defaultImage = "postgres:17-alpine"

func main() {
	log.SetFlags(0)
	// Stdin may end while the image is still being pulled.
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	if err := run(ctx, os.Args[1:]); err != nil {
		log.Fatal(err)
	}
}

// run serves until ctx is done.
func run(ctx context.Context, args []string) (err error) {
	image := cmp.Or(os.Getenv("RATELIMIT_POSTGRES_IMAGE"), defaultImage)
	ctr, err := postgres.Run(
		ctx, image,
		testcontainers.WithCmd(append([]string{"postgres"}, args...)...),
		// Engines publish ports on all interfaces.
		postgres.WithPassword(rand.Text()),
		postgres.BasicWaitStrategies(),
	)
	// A container with a server that does not become ready is there to be removed, too. The
	// server has nothing to save, so it gets no time to.
	defer func() {
		err = errors.Join(err, testcontainers.TerminateContainer(ctr, testcontainers.StopTimeout(0)))
	}()
	if err != nil {
		return fmt.Errorf("starting %s: %w", image, err)
	}
	url, err := ctr.ConnectionString(ctx, "sslmode=disable")
	if err != nil {
		return fmt.Errorf("asking for the address of %s: %w", image, err)
	}
	fmt.Println(url)
	<-ctx.Done()
	return nil
}
