package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"strings"
	"time"
)

// record has curl speak to the service, and prints commands and answers.
func record(ctx context.Context, out io.Writer) error {
	return with(ctx, "127.0.0.1:0", func(url string) error {
		hello := []string{"-i", "-H", "X-Api-Key: ann", url + "/hello"}
		var answer string
		for range 4 {
			var err error
			if answer, err = curl(ctx, out, hello...); err != nil {
				return err
			}
		}
		wait := regexp.MustCompile(`(?m)^Retry-After: (\d+)`).FindStringSubmatch(answer)
		if wait == nil {
			return errors.New("the fourth answer has no Retry-After")
		}
		fmt.Fprintf(out, "$ sleep %s\n\n", wait[1])
		seconds, err := time.ParseDuration(wait[1] + "s")
		if err != nil {
			return err
		}
		select {
		case <-time.After(seconds):
		case <-ctx.Done():
			return ctx.Err()
		}
		for _, args := range [][]string{hello, {"-i", "-H", "X-Api-Key: ann", url + "/rows?rows=5000"}} {
			if _, err := curl(ctx, out, args...); err != nil {
				return err
			}
		}
		return nil
	})
}

// curl prints a command as a shell takes it, and its answer, which it returns.
func curl(ctx context.Context, out io.Writer, args ...string) (string, error) {
	quoted := make([]string, len(args))
	for i, a := range args {
		quoted[i] = a
		if strings.ContainsAny(a, " ?") {
			quoted[i] = "'" + a + "'"
		}
	}
	fmt.Fprintf(out, "$ curl %s\n", strings.Join(quoted, " "))
	answer, err := exec.CommandContext(ctx, "curl", append([]string{"--silent", "--show-error"}, args...)...).Output()
	if err != nil {
		return "", fmt.Errorf("curl: %w", err)
	}
	text := strings.ReplaceAll(string(answer), "\r", "")
	fmt.Fprintln(out, text)
	return text, nil
}
